"""What fields of requests may hold, as JSON Schema: for the OpenAPI document. Checks nothing.

Which fields there are is said by the tables that requests are checked with; a test sends what these
schemas forbid, and expects a refusal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pippin.api.chat_messages import ROLES
from pippin.api.endpoints.embeddings import EMBEDDINGS_HONOURED, FORMATS
from pippin.api.endpoints.generate import (
    GENERATE_HONOURED,
    GENERATE_REFUSED,
    PARAMS_HONOURED,
    PARAMS_REFUSED,
)
from pippin.api.endpoints.tokenize import DETOKENIZE_HONOURED, TOKENIZE_HONOURED, TOKENIZE_REFUSED
from pippin.api.fields import (
    CHAT_HONOURED,
    CHAT_REFUSED,
    COMPLETION_HONOURED,
    COMPLETION_REFUSED,
    Refusal,
)
from pippin.api.model_info import ModelInfo
from pippin.api.parameters import MAX_CHOICES, MAX_LOGPROBS, MAX_PRIORITY, MAX_SEED
from pippin.api.reasoning import EFFORTS
from pippin.config import LimitsConfig

Schema = dict[str, Any]
ANYTHING: Schema = {}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}


def request_schemas(model: ModelInfo, limits: LimitsConfig) -> dict[str, Schema]:
    """Bodies of requests, by path."""
    fields = _shared_fields(model, limits)
    prompts = {"anyOf": [STRING, _some(STRING), _ids(model), _some(_ids(model))]}
    generate_params = {
        **fields,
        "max_new_tokens": _integer(0),
        "min_new_tokens": _integer(0),
        "sampling_seed": fields["seed"],
    }
    params = _body(PARAMS_HONOURED, PARAMS_REFUSED, generate_params)
    return {
        "/v1/chat/completions": _body(
            CHAT_HONOURED,
            CHAT_REFUSED,
            fields | {"logprobs": BOOLEAN, "messages": _messages()},
            required=("model", "messages"),
        ),
        "/v1/completions": _body(
            COMPLETION_HONOURED,
            COMPLETION_REFUSED,
            fields | {"prompt": prompts, "max_tokens": _integer(0)},
            required=("model", "prompt"),
        ),
        "/v1/embeddings": _body(
            EMBEDDINGS_HONOURED, {}, fields | {"input": prompts}, required=("model", "input")
        ),
        "/tokenize": _body(
            TOKENIZE_HONOURED,
            TOKENIZE_REFUSED,
            fields | {"prompt": {"anyOf": [STRING, _some(STRING)]}, "messages": _messages()},
        ),
        "/detokenize": _body(DETOKENIZE_HONOURED, {}, fields, required=("tokens",)),
        "/generate": _body(
            GENERATE_HONOURED, GENERATE_REFUSED, fields | {"sampling_params": params}
        ),
    }


def _shared_fields(model: ModelInfo, limits: LimitsConfig) -> dict[str, Schema]:
    """By name. Endpoints that mean something else by a name say so."""
    ids, rows = _ids(model), {"type": "array", "items": _ids(model)}
    text = {"type": "string", "minLength": 1}
    return {
        "model": {"type": "string", "enum": list(model.names)},
        "max_tokens": _integer(1),
        "max_completion_tokens": _integer(1),
        "min_tokens": _integer(0),
        "temperature": _number(0, 2),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": _integer(-1),
        "min_p": _number(0, 1),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": _nullable(_number(-100, 100)),
            "maxProperties": limits.max_logit_bias,
        },
        "seed": _integer(-MAX_SEED - 1, MAX_SEED - MAX_CHOICES),
        "n": _integer(1, MAX_CHOICES),
        "best_of": _integer(1, MAX_CHOICES),
        "stop": {"anyOf": [text, {"type": "array", "items": text, "maxItems": limits.max_stops}]},
        "stop_token_ids": ids,
        "logprobs": _integer(0, MAX_LOGPROBS),
        "top_logprobs": _integer(0, MAX_LOGPROBS),
        "stream_options": _object(include_usage=BOOLEAN, include_obfuscation=BOOLEAN),
        "response_format": {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
        "json_schema": {"type": ["object", "string"]},
        "metadata": {"type": "object", "additionalProperties": _nullable(STRING)},
        "priority": _integer(-MAX_PRIORITY, MAX_PRIORITY),
        "tools": {"type": "array", "items": OBJECT},
        "tool_choice": {"type": ["string", "object"]},
        "parallel_tool_calls": BOOLEAN,
        "reasoning_effort": {"type": "string", "enum": list(EFFORTS)},
        "timeout": {"type": "number", "exclusiveMinimum": 0},
        "chat_template_kwargs": OBJECT,
        "encoding_format": {"type": "string", "enum": list(FORMATS)},
        "dimensions": _integer(1),
        "tokens": {"anyOf": [ids, rows]},
        "text": {"anyOf": [STRING, _some(STRING)]},
        "input_ids": {"anyOf": [ids, rows]},
        "rid": {"anyOf": [STRING, _some(STRING)]},
        "logprob_start_len": _integer(-1),
        "top_logprobs_num": _integer(0, MAX_LOGPROBS),
        **dict.fromkeys(("regex", "ebnf", "user", "safety_identifier", "prompt_cache_key"), STRING),
        **dict.fromkeys(("ignore_eos", "stream", "echo", "add_generation_prompt"), BOOLEAN),
        **dict.fromkeys(("add_special_tokens", "skip_special_tokens"), BOOLEAN),
        **dict.fromkeys(
            ("return_token_strs", "return_text_in_logprobs", "return_logprob"), BOOLEAN
        ),
    }


def _body(
    honoured: Iterable[str],
    refused: Mapping[str, Refusal],
    fields: Mapping[str, Schema],
    *,
    required: tuple[str, ...] = (),
) -> Schema:
    """Of fields that are refused only values that ask for nothing are left; null is "not sent"."""
    properties = {
        name: fields.get(name, ANYTHING)
        if name in required
        else _nullable(fields.get(name, ANYTHING))
        for name in sorted(honoured)
    }
    for name, refusal in sorted(refused.items()):
        properties[name] = {"enum": [*refusal.neutral, None], "description": refusal.why}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": {"type": "null"},
    }


def _messages() -> Schema:
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": {}},
        "required": ["role"],
    }
    return {"type": "array", "items": message, "minItems": 1}


def _object(**properties: Schema) -> Schema:
    known = {name: _nullable(schema) for name, schema in properties.items()}
    return {"type": "object", "properties": known, "additionalProperties": {"type": "null"}}


def _nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


def _some(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _ids(model: ModelInfo) -> Schema:
    return {"type": "array", "items": _integer(0, model.vocab_size - 1)}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low} | ({} if high is None else {"maximum": high})


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}
