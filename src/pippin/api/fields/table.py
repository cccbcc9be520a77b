"""A table of fields: checks a request, and describes it as JSON Schema. Knows no dialect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pippin.api.model_info import RequestRules
from pippin.api.requests.body import (
    EFFORTS,
    MAX_ID_DIGITS,
    MAX_LABEL_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOOLS,
    Body,
    are_token_ids,
    read_salt,
    shown,
    token_ids_in_words,
)
from pippin.errors import UnsupportedField

Schema = dict[str, Any]
Answer = Literal["honoured", "ignored", "refused"]  # what is done with a field


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def some(items: Schema, most: int | None = None) -> Schema:
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": 1, **limit}


@dataclass(frozen=True)
class ValueKind:
    """By default: described here, and checked by `test`, or by the code that reads it."""

    text: str = ""
    json_schema: Schema = field(default_factory=dict)
    test: Callable[[Any], bool] = lambda value: True
    answer: ClassVar[Answer] = "honoured"

    def words(self, rules: RequestRules) -> str:
        return self.text

    def schema(self, rules: RequestRules) -> Schema:
        return self.json_schema

    def accepts(self, value: Any, rules: RequestRules) -> bool:
        return self.test(value)

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        if not self.accepts(body.get(field), rules):
            raise body.wrong(field, self.words(rules))


def one_of(*choices: str) -> ValueKind:
    words = f"one of {', '.join(choices)}" if len(choices) > 1 else f'"{choices[0]}"'
    schema = {"type": "string", "enum": list(choices)}
    return ValueKind(words, schema, lambda value: value in choices)


def list_of(*choices: str) -> ValueKind:
    schema = {"type": "array", "items": {"enum": list(choices)}}

    def test(value: Any) -> bool:
        return isinstance(value, list) and all(item in choices for item in value)

    return ValueKind(f"a list of {', '.join(choices)}", schema, test)


def number_from(low: int, high: int | None = None, *, above: bool = False) -> ValueKind:
    """From `low` to `high`; `above`: greater than `low`."""
    return _number("a number", int | float, low, high, above)


def integer_from(low: int, high: int | None = None) -> ValueKind:
    return _number("an integer", int, low, high, above=False)


def _number(kind: str, types: Any, low: int, high: int | None, above: bool) -> ValueKind:
    schema = {"type": kind.split()[1], "exclusiveMinimum" if above else "minimum": low}
    if high is None:
        words = f"above {low:,}" if above else f"of at least {low:,}"
    else:
        words = f"above {low:,} and at most {high:,}" if above else f"from {low:,} to {high:,}"
        schema["maximum"] = high
    most = sys.float_info.max if high is None and types is not int else high

    def test(value: Any) -> bool:
        is_number = isinstance(value, types) and not isinstance(value, bool)
        if not is_number or value < low or (above and value == low):
            return False
        return most is None or bool(value <= most)

    return ValueKind(f"{kind} {words}", schema, test)


def text(most: int) -> ValueKind:
    schema = {"type": "string", "maxLength": most}
    words = f"a string of at most {most:,} characters"
    return ValueKind(words, schema, lambda value: isinstance(value, str) and len(value) <= most)


BOOLEAN = ValueKind("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
STRING = ValueKind("a string", {"type": "string"}, lambda value: isinstance(value, str))
OBJECT = ValueKind("an object", {"type": "object"}, lambda value: isinstance(value, dict))
LABEL, LABEL_VALUE = text(MAX_LABEL_CHARS), text(MAX_LABEL_VALUE_CHARS)


class Labels(ValueKind):
    def words(self, rules: RequestRules) -> str:
        names = f"with names of at most {MAX_LABEL_CHARS:,} characters"
        return f"an object of at most {MAX_LABELS} strings {names}"

    def schema(self, rules: RequestRules) -> Schema:
        values = nullable(LABEL_VALUE.json_schema)
        return {
            "type": "object",
            "additionalProperties": values,
            "maxProperties": MAX_LABELS,
        }

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        labels = body.required_object(field)
        if len(labels) > MAX_LABELS or any(len(n) > MAX_LABEL_CHARS for n in labels.fields()):
            raise body.wrong(field, self.words(rules))
        for name in filter(labels.has, labels.fields()):
            LABEL_VALUE.check(labels, name, rules)


class ModelName(ValueKind):
    def schema(self, rules: RequestRules) -> Schema:
        names = rules.model.accepted_names
        if names is None:
            return {"type": "string"}
        return {"type": "string", "enum": [*names, *rules.model.other_names]}

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        rules.model.check_name(body.required_string(field))


class StopStrings(ValueKind):
    def words(self, rules: RequestRules) -> str:
        most = f"at most {rules.limits.max_stops} strings (--max-stops)"
        return f"a string or a list of {most}, each of 1 to {MAX_STOP_CHARS:,} characters"

    def schema(self, rules: RequestRules) -> Schema:
        one = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
        return {"anyOf": [one, {"type": "array", "items": one, "maxItems": rules.limits.max_stops}]}

    def accepts(self, value: Any, rules: RequestRules) -> bool:
        given = [value] if isinstance(value, str) else value
        return (
            isinstance(given, list | tuple)
            and len(given) <= rules.limits.max_stops
            and all(isinstance(each, str) and 0 < len(each) <= MAX_STOP_CHARS for each in given)
        )


def _ids_schema(rules: RequestRules) -> Schema:
    return {"type": "array", "items": integer_from(0, rules.model.vocab_size - 1).json_schema}


class StopTokens(ValueKind):
    def words(self, rules: RequestRules) -> str:
        return f"a list of at most {MAX_STOP_TOKEN_IDS:,} {token_ids_in_words(rules.vocab_size)}"

    def schema(self, rules: RequestRules) -> Schema:
        return _ids_schema(rules) | {"maxItems": MAX_STOP_TOKEN_IDS}

    def accepts(self, value: Any, rules: RequestRules) -> bool:
        return are_token_ids(value, rules.vocab_size) and len(value) <= MAX_STOP_TOKEN_IDS


@dataclass(frozen=True)
class TextsOrIds(ValueKind):
    """One text, or one list of token ids, or several of either."""

    texts: bool = True
    ids: bool = True

    def words(self, rules: RequestRules) -> str:
        ids = f"a list of {token_ids_in_words(rules.vocab_size)} or a list of such lists"
        return ", ".join(["a string or a list of strings"] * self.texts + [ids] * self.ids)

    def schema(self, rules: RequestRules) -> Schema:
        one = _ids_schema(rules)
        texts = [STRING.json_schema, some(STRING.json_schema)]
        return {"anyOf": texts * self.texts + [one, {"type": "array", "items": one}] * self.ids}

    def accepts(self, value: Any, rules: RequestRules) -> bool:
        rows = rows_of(value)
        if self.texts and all(isinstance(row, str) for row in rows):
            return True
        return self.ids and all(are_token_ids(row, rules.vocab_size) for row in rows)


def rows_of(value: Any) -> list[Any]:
    """The texts or lists of token ids in a value of `TextsOrIds`."""
    is_many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    return value if is_many else [value]


class LogitBias(ValueKind):
    bias = number_from(-100, 100)

    def words(self, rules: RequestRules) -> str:
        most = f"{rules.limits.max_logit_bias:,} (--max-logit-bias)"
        ids = token_ids_in_words(rules.vocab_size)
        return f"an object of at most {most} {ids}, each with {self.bias.text}"

    def schema(self, rules: RequestRules) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": nullable(self.bias.json_schema),
            "maxProperties": rules.limits.max_logit_bias,
        }

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        biases = body.required_object(field)
        if len(biases) > rules.limits.max_logit_bias:
            raise body.error(field, f"has {len(biases):,} tokens; it must be {self.words(rules)}")
        for key in biases.fields():
            is_id = key.isdecimal() and len(key) <= MAX_ID_DIGITS
            if not is_id or int(key) >= rules.vocab_size:
                raise body.error(field, f"has the key {shown(key)}; it must be {self.words(rules)}")
            if biases.has(key):
                self.bias.check(biases, key, rules)


@dataclass(frozen=True)
class FieldTable:
    fields: Mapping[str, ValueKind]
    required: tuple[str, ...] = ()
    ignores_unknown: bool = False

    def check(self, body: Body, rules: RequestRules) -> None:
        """Raise for a field that is unknown, missing or refused, or has a wrong value."""
        if self.ignores_unknown:
            body.ignore_unknown(self.fields)
        else:
            body.check_known(self.fields)
        for name in self.required:
            body.require(name)
        self.check_values(body, rules)

    def check_values(self, body: Body, rules: RequestRules) -> None:
        for name, kind in self.fields.items():
            if body.has(name):
                kind.check(body, name, rules)

    def schema(self, rules: RequestRules) -> Schema:
        """Null is "not sent"."""
        schemas = {name: kind.schema(rules) for name, kind in sorted(self.fields.items())}
        return {
            "type": "object",
            "properties": {
                name: schema if name in self.required else nullable(schema)
                for name, schema in schemas.items()
            },
            "required": list(self.required),
            "additionalProperties": {} if self.ignores_unknown else {"type": "null"},
        }


@dataclass(frozen=True)
class Members(ValueKind):
    table: FieldTable = field(default_factory=lambda: FieldTable({}))

    def schema(self, rules: RequestRules) -> Schema:
        return self.table.schema(rules)

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        self.table.check(body.required_object(field), rules)


def members(**fields: ValueKind) -> Members:
    return Members(f"an object with {', '.join(fields)}", table=FieldTable(fields))


@dataclass(frozen=True)
class Unused(ValueKind):
    """Of a field that has no effect; `neutral` values ask for nothing, and are accepted."""

    neutral: tuple[Any, ...] = ()

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        value = body.get(field)
        if not any(type(value) is type(each) and value == each for each in self.neutral):
            self.answer_to(body, field)  # 0 is not false

    def answer_to(self, body: Body, field: str) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Ignoring(Unused):
    """It cannot change the reply here: it is listed in a header of the response."""

    answer: ClassVar[Answer] = "ignored"

    def answer_to(self, body: Body, field: str) -> None:
        body.ignore(field, self.text)


@dataclass(frozen=True)
class Refusal(Unused):
    answer: ClassVar[Answer] = "refused"

    def answer_to(self, body: Body, field: str) -> None:
        name = body.name(field)
        accepted = " or ".join(map(shown, self.neutral))
        hint = f" (only {accepted} is accepted)" if accepted else ""
        raise UnsupportedField(f"{name} is not supported: {self.text}{hint}", param=name)


def refused_field(why: str, *neutral: Any) -> Refusal:
    return Refusal(why, {"enum": list(neutral), "description": why}, neutral=neutral)


def ignored_field(why: str, *neutral: Any) -> Ignoring:
    return Ignoring(why, {"description": f"ignored: {why}"}, neutral=neutral)


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
    return ValueKind(f"a list of 1 to {MAX_MESSAGES:,} messages", some(message, MAX_MESSAGES))


MODEL: Fields = {"model": ModelName("a name in `/v1/models`")}
EFFORT = one_of(*EFFORTS)
TOOLS: Fields = {
    "tools": ValueKind(
        f"a list of at most {MAX_TOOLS:,} tools",
        {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS},
    )
}
SAMPLING: Fields = {
    "min_tokens": integer_from(0),
    "temperature": number_from(0, 2),
    "top_p": number_from(0, 1, above=True),
    "top_k": integer_from(-1),
    "min_p": number_from(0, 1),
    "repetition_penalty": number_from(0, above=True),
    "presence_penalty": number_from(-2, 2),
    "frequency_penalty": number_from(-2, 2),
    "logit_bias": LogitBias(),
    "seed": integer_from(-MAX_SEED - 1, MAX_SEED - MAX_CHOICES),
    "n": integer_from(1, MAX_CHOICES),
    "stop": StopStrings(),
    "stop_token_ids": StopTokens(),
    "ignore_eos": BOOLEAN,
    "speculate": BOOLEAN,
    "json_schema": ValueKind("a JSON Schema, or its JSON", {"type": ["object", "string"]}),
    "regex": STRING,
    "ebnf": STRING,
}
SERVING: Fields = {  # of every request that is run
    "timeout": number_from(0, above=True),
    "priority": integer_from(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": Salt(
        f"a string of 1 to {MAX_SALT_CHARS:,} characters",
        {"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
    ),
}
STREAM: Fields = {"stream": BOOLEAN}
STREAM_OPTIONS: Fields = {
    "stream_options": members(
        include_usage=BOOLEAN,
        include_obfuscation=ignored_field("streams are not padded", False),
        continuous_usage_stats=ignored_field("usage is in the last event", False),
    )
}
USER: Fields = {"user": LABEL}
LABELS: Fields = {
    "metadata": Labels(),
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
}
TEMPLATE: Fields = {
    "chat_template_kwargs": OBJECT,
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
}
GENERATION: Fields = {  # of chat and text completions
    **MODEL,
    "max_tokens": integer_from(1),
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
