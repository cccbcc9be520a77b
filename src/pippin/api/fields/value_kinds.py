"""Kinds of values: what each accepts, in words and as JSON Schema. Knows no field by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import (
    MAX_LABEL_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
)
from pippin.api.requests.token_ids import MAX_ID_DIGITS, are_token_ids, token_ids_in_words

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
