"""Fields that several dialects have. Knows no dialect."""

from __future__ import annotations

from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import ignored_field, members
from pippin.api.fields.value_kinds import Schema, ValueKind
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_MESSAGES, MAX_TOOLS
from pippin.api.requests.reasoning_effort import EFFORTS
from pippin.api.requests.salts import MAX_SALT_CHARS, read_salt

Fields = dict[str, ValueKind]
MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000


class Salt(ValueKind):
    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        read_salt(body)


def pick(fields: Fields, *names: str) -> Fields:
    return {name: fields[name] for name in names}


def conversation(roles: tuple[str, ...], content: Schema, *required: str) -> ValueKind:
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": content},
        "required": list(required),
    }
    return ValueKind(f"a list of 1 to {MAX_MESSAGES:,} messages", kinds.some(message, MAX_MESSAGES))


MODEL: Fields = {"model": kinds.ModelName("a name in `/v1/models`")}
EFFORT = kinds.one_of(*EFFORTS)
TOOLS: Fields = {
    "tools": ValueKind(
        f"a list of at most {MAX_TOOLS:,} tools",
        {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS},
    )
}
SAMPLING: Fields = {
    "min_tokens": kinds.integer_from(0),
    "temperature": kinds.number_from(0, 2),
    "top_p": kinds.number_from(0, 1, above=True),
    "top_k": kinds.integer_from(-1),
    "min_p": kinds.number_from(0, 1),
    "repetition_penalty": kinds.number_from(0, above=True),
    "presence_penalty": kinds.number_from(-2, 2),
    "frequency_penalty": kinds.number_from(-2, 2),
    "logit_bias": kinds.LogitBias(),
    "seed": kinds.integer_from(-MAX_SEED - 1, MAX_SEED - MAX_CHOICES),
    "n": kinds.integer_from(1, MAX_CHOICES),
    "stop": kinds.StopStrings(),
    "stop_token_ids": kinds.StopTokens(),
    "ignore_eos": kinds.BOOLEAN,
    "speculate": kinds.BOOLEAN,
    "json_schema": ValueKind("a JSON Schema, or its JSON", {"type": ["object", "string"]}),
    "regex": kinds.STRING,
    "ebnf": kinds.STRING,
}
SERVING: Fields = {  # of every request that is run
    "timeout": kinds.number_from(0, above=True),
    "priority": kinds.integer_from(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": Salt(
        f"a string of 1 to {MAX_SALT_CHARS:,} characters",
        {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
    ),
}
STREAM: Fields = {"stream": kinds.BOOLEAN}
STREAM_OPTIONS: Fields = {
    "stream_options": members(
        include_usage=kinds.BOOLEAN,
        include_obfuscation=ignored_field("streams are not padded", False),
        continuous_usage_stats=ignored_field("usage is in the last event", False),
    )
}
USER: Fields = {"user": kinds.LABEL}
LABELS: Fields = {
    "metadata": kinds.Labels(),
    "safety_identifier": kinds.LABEL,
    "prompt_cache_key": kinds.LABEL,
}
TEMPLATE: Fields = {
    "chat_template_kwargs": kinds.OBJECT,
    "add_generation_prompt": kinds.BOOLEAN,
    "continue_final_message": kinds.BOOLEAN,
}
GENERATION: Fields = {  # of chat and text completions
    **MODEL,
    "max_tokens": kinds.integer_from(1),
    **SAMPLING,
    **STREAM,
    **STREAM_OPTIONS,
    "response_format": ValueKind(
        "an object with a `type` of text, json_object or json_schema",
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
    ),
    **USER,
    **SERVING,
}
