"""What fields of requests may hold, as JSON Schema: for the OpenAPI document. Checks nothing.

Which fields there are is said by the tables that requests are checked with; a test sends what these
schemas forbid, and expects a refusal.
"""

from __future__ import annotations

from pippin.api.endpoints.dialect_schemas import messages_schemas, responses_schema
from pippin.api.endpoints.embeddings import EMBEDDINGS_HONOURED, FORMATS
from pippin.api.endpoints.schema_words import (
    BOOLEAN,
    OBJECT,
    OBJECTS,
    STRING,
    Schema,
    body_of,
    ids,
    integer,
    label,
    nullable,
    number,
    object_of,
    some,
)
from pippin.api.endpoints.tokenize import DETOKENIZE_HONOURED, TOKENIZE_HONOURED, TOKENIZE_REFUSED
from pippin.api.model_info import ModelInfo
from pippin.api.requests.bounds import (
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    MAX_MESSAGES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
)
from pippin.api.requests.chat_messages import ROLES
from pippin.api.requests.fields import (
    CHAT_HONOURED,
    CHAT_REFUSED,
    COMPLETION_HONOURED,
    COMPLETION_REFUSED,
)
from pippin.api.requests.reasoning_effort import EFFORTS
from pippin.api.requests.salts import MAX_SALT_CHARS
from pippin.api.requests.sampling_fields import MAX_CHOICES, MAX_LOGPROBS, MAX_PRIORITY, MAX_SEED
from pippin.config import LimitsConfig


def request_schemas(model: ModelInfo, limits: LimitsConfig) -> dict[str, Schema]:
    """Bodies of requests, by path."""
    fields = _shared_fields(model, limits)
    prompts = {"anyOf": [STRING, some(STRING), ids(model), some(ids(model))]}
    return {
        "/v1/responses": responses_schema(fields),
        **messages_schemas(fields),
        "/v1/chat/completions": body_of(
            CHAT_HONOURED,
            CHAT_REFUSED,
            fields | {"logprobs": BOOLEAN, "messages": _messages()},
            required=("model", "messages"),
        ),
        "/v1/completions": body_of(
            COMPLETION_HONOURED,
            COMPLETION_REFUSED,
            fields | {"prompt": prompts, "max_tokens": integer(0)},
            required=("model", "prompt"),
        ),
        "/v1/embeddings": body_of(
            EMBEDDINGS_HONOURED, {}, fields | {"input": prompts}, required=("model", "input")
        ),
        "/tokenize": body_of(
            TOKENIZE_HONOURED,
            TOKENIZE_REFUSED,
            fields | {"prompt": {"anyOf": [STRING, some(STRING)]}, "messages": _messages()},
        ),
        "/detokenize": body_of(DETOKENIZE_HONOURED, {}, fields, required=("tokens",)),
    }


def _shared_fields(model: ModelInfo, limits: LimitsConfig) -> dict[str, Schema]:
    """By name. Endpoints that mean something else by a name say so."""
    one, rows = ids(model), {"type": "array", "items": ids(model)}
    text = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
    labels = ("user", "safety_identifier", "prompt_cache_key")
    return {
        "model": {"type": "string", "enum": list(model.names)},
        "max_tokens": integer(1),
        "max_completion_tokens": integer(1),
        "min_tokens": integer(0),
        "temperature": number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": integer(-1),
        "min_p": number(0, 1),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": nullable(number(-100, 100)),
            "maxProperties": limits.max_logit_bias,
        },
        "seed": integer(-MAX_SEED - 1, MAX_SEED - MAX_CHOICES),
        "n": integer(1, MAX_CHOICES),
        "best_of": integer(1, MAX_CHOICES),
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": limits.max_stops}]},
        "stop_token_ids": one | {"maxItems": MAX_STOP_TOKEN_IDS},
        "logprobs": integer(0, MAX_LOGPROBS),
        "top_logprobs": integer(0, MAX_LOGPROBS),
        "stream_options": object_of(include_usage=BOOLEAN, include_obfuscation=BOOLEAN),
        "response_format": {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
        "json_schema": {"type": ["object", "string"]},
        "metadata": {
            "type": "object",
            "additionalProperties": nullable(label(MAX_LABEL_VALUE_CHARS)),
            "maxProperties": MAX_LABELS,
        },
        "priority": integer(-MAX_PRIORITY, MAX_PRIORITY),
        "cache_salt": {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
        "tools": OBJECTS | {"maxItems": MAX_TOOLS},
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": BOOLEAN,
        "reasoning_effort": {"type": "string", "enum": list(EFFORTS)},
        "timeout": {"type": "number", "exclusiveMinimum": 0},
        "chat_template_kwargs": OBJECT,
        "encoding_format": {"type": "string", "enum": list(FORMATS)},
        "dimensions": integer(1),
        "tokens": {"anyOf": [one, rows]},
        **dict.fromkeys(("regex", "ebnf"), STRING),
        **dict.fromkeys(labels, label()),
        **dict.fromkeys(("ignore_eos", "stream", "echo", "add_generation_prompt"), BOOLEAN),
        **dict.fromkeys(("add_special_tokens", "skip_special_tokens"), BOOLEAN),
        "return_token_strs": BOOLEAN,
    }


def _messages() -> Schema:
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": {}},
        "required": ["role"],
    }
    return some(message) | {"maxItems": MAX_MESSAGES}
