"""Tables of fields: what each may hold, what is done with it, and our name of it.

A request is read once, by the table of its endpoint: msgspec checks and converts its values. The
OpenAPI document and the tables in `docs/` are made of the same types.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

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
    check_salt,
    shown,
    token_ids_in_words,
)
from pippin.errors import RequestError, UnsupportedField

Schema = dict[str, Any]
Answer = Literal["honoured", "ignored", "refused"]  # what is done with a field
MAX_CHOICES = 128  # of one prompt
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def in_words(schema: Schema) -> str:
    """What a value must be."""
    match schema:
        case {"enum": [choice]}:
            return f'"{choice}"'
        case {"enum": choices}:
            return f"one of {', '.join(choices)}"
        case {"type": "string", "maxLength": most}:
            return f"a string of at most {most:,} characters"
        case {"type": "integer" | "number" as kind, **limits}:
            what, most = "an integer" if kind == "integer" else "a number", limits.get("maximum")
            if (low := limits.get("minimum")) is not None:
                bounds = f"of at least {low:,}" if most is None else f"from {low:,} to {most:,}"
                return f"{what} {bounds}"
            low = limits["exclusiveMinimum"]
            return f"{what} above {low:,}" + ("" if most is None else f" and at most {most:,}")
        case {"type": "boolean"}:
            return "true or false"
    return f"a {schema['type']}"


@dataclass(frozen=True)
class ValueKind:
    """What a field may hold, as a type of msgspec's; in words, where its limits do not say it."""

    text: str = ""
    type: Any = Any  # or several, where msgspec has no union of them
    json_schema: Schema | None = None  # where the document says more than the type
    ours: str = ""  # our name of the field, if it is another
    unset: Any = None  # a value that means "not sent"
    convert: Callable[[Any], Any] | None = None
    answer: Answer = "honoured"

    def words(self, rules: RequestRules) -> str:
        return self.text or in_words(self.schema(rules))

    def schema(self, rules: RequestRules) -> Schema:
        types = self.type if isinstance(self.type, tuple) else (self.type,)
        found = [_inlined(msgspec.json.schema(each)) for each in types]
        schema = self.json_schema or (found[0] if len(found) == 1 else {"anyOf": found})
        return {"description": self.text, **schema} if self.text else schema

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        """The value as it is used."""
        for kind in self.type if isinstance(self.type, tuple) else (self.type,):
            with suppress(msgspec.ValidationError):
                return msgspec.convert(body.get(field), kind)
        raise body.wrong(field, self.words(rules))


def _inlined(schema: Any, types: Mapping[str, Any] | None = None) -> Any:
    """With the types that it refers to."""
    if isinstance(schema, list):
        return [_inlined(each, types) for each in schema]
    if not isinstance(schema, dict):
        return schema
    types = schema.get("$defs", types)
    if types is not None and "$ref" in schema:
        return _inlined(types[schema["$ref"].removeprefix("#/$defs/")], types)
    return {key: _inlined(value, types) for key, value in schema.items() if key != "$defs"}


@dataclass(frozen=True)
class ByRules(ValueKind):
    """Of a kind that depends on the model or on the server's limits."""

    kind: Callable[[RequestRules], ValueKind] = lambda rules: ValueKind()

    def words(self, rules: RequestRules) -> str:
        return self.kind(rules).words(rules)

    def schema(self, rules: RequestRules) -> Schema:
        return self.kind(rules).schema(rules)

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        return self.kind(rules).check(body, field, rules)


def one_of(*choices: str) -> ValueKind:
    return ValueKind(type=Literal[choices], json_schema={"type": "string", "enum": list(choices)})


def list_of(*choices: str) -> ValueKind:
    choice: Any = Literal[choices]
    return ValueKind(f"a list of {', '.join(choices)}", list[choice])


def number_from(low: int, high: int | None = None, *, above: bool = False) -> ValueKind:
    """From `low` to `high`; `above`: greater than `low`."""
    most = sys.float_info.max if high is None else high
    kind: Any = Annotated[float, Meta(gt=low, le=most) if above else Meta(ge=low, le=most)]
    schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low}
    return ValueKind(type=kind, json_schema=schema if high is None else None)


def integer_from(low: int, high: int | None = None, **more: Any) -> ValueKind:
    return ValueKind(type=Annotated[int, Meta(ge=low, le=high)], **more)


def text(most: int) -> ValueKind:
    return ValueKind(type=Annotated[str, Meta(max_length=most)])


BOOLEAN, STRING = ValueKind(type=bool), ValueKind(type=str)
OBJECT = ValueKind("an object", dict[str, Any])
LABEL, LABEL_VALUE = text(MAX_LABEL_CHARS), text(MAX_LABEL_VALUE_CHARS)


def _ids(rules: RequestRules, most: int | None = None) -> Any:
    return Annotated[
        list[Annotated[int, Meta(ge=0, le=rules.vocab_size - 1)]], Meta(max_length=most)
    ]


def token_ids(rules: RequestRules, most: int | None = None) -> ValueKind:
    limit = "" if most is None else f"at most {most:,} "
    return ValueKind(f"a list of {limit}{token_ids_in_words(rules.vocab_size)}", _ids(rules, most))


def _stop_strings(rules: RequestRules) -> ValueKind:
    most = rules.limits.max_stops
    one: Any = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
    return ValueKind(
        f"a string or a list of at most {most} strings (--max-stops), each of 1 to "
        f"{MAX_STOP_CHARS:,} characters",
        one | Annotated[list[one], Meta(max_length=most)],
    )


def texts_or_ids(*, texts: bool = True, ids: bool = True) -> ByRules:
    """One text, or one list of token ids, or several of either."""

    def kind(rules: RequestRules) -> ValueKind:
        tokens: Any = _ids(rules)
        words = f"a list of {token_ids_in_words(rules.vocab_size)} or a list of such lists"
        described = ["a string or a list of strings"] * texts + [words] * ids
        several = Annotated[list[str], Meta(min_length=1)]
        return ValueKind(
            ", ".join(described), (str, several) * texts + (tokens, list[tokens]) * ids
        )

    return ByRules(kind=kind)


def rows_of(value: Any) -> list[Any]:
    """The texts or lists of token ids in a value of `texts_or_ids`."""
    is_many = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    return value if is_many else [value]


class Labels(ValueKind):
    def words(self, rules: RequestRules) -> str:
        names = f"with names of at most {MAX_LABEL_CHARS:,} characters"
        return f"an object of at most {MAX_LABELS} strings {names}"

    def schema(self, rules: RequestRules) -> Schema:
        values = nullable(LABEL_VALUE.schema(rules))
        return {"type": "object", "additionalProperties": values, "maxProperties": MAX_LABELS}

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        labels = body.required_object(field)
        if len(labels) > MAX_LABELS or any(len(n) > MAX_LABEL_CHARS for n in labels.fields()):
            raise body.wrong(field, self.words(rules))
        for name in filter(labels.has, labels.fields()):
            LABEL_VALUE.check(labels, name, rules)
        return body.get(field)


class ModelName(ValueKind):
    def schema(self, rules: RequestRules) -> Schema:
        names = rules.model.accepted_names
        if names is None:
            return {"type": "string"}
        return {"type": "string", "enum": [*names, *rules.model.other_names]}

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        rules.model.check_name(body.required_string(field))


class LogitBias(ValueKind):
    bias = number_from(-100, 100)

    def words(self, rules: RequestRules) -> str:
        most = f"{rules.limits.max_logit_bias:,} (--max-logit-bias)"
        ids = token_ids_in_words(rules.vocab_size)
        return f"an object of at most {most} {ids}, each with {self.bias.words(rules)}"

    def schema(self, rules: RequestRules) -> Schema:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": nullable(self.bias.schema(rules)),
            "maxProperties": rules.limits.max_logit_bias,
        }

    def check(self, body: Body, field: str, rules: RequestRules) -> dict[int, float]:
        biases = body.required_object(field)
        if len(biases) > rules.limits.max_logit_bias:
            raise body.error(field, f"has {len(biases):,} tokens; it must be {self.words(rules)}")
        for key in biases.fields():
            is_id = key.isdecimal() and len(key) <= MAX_ID_DIGITS
            if not is_id or int(key) >= rules.vocab_size:
                raise body.error(field, f"has the key {shown(key)}; it must be {self.words(rules)}")
        return {
            int(key): self.bias.check(biases, key, rules) if biases.has(key) else 0.0
            for key in biases.fields()
        }


class Salt(ValueKind):
    def check(self, body: Body, field: str, rules: RequestRules) -> bytes:
        """Its digest: no error echoes a secret."""
        return check_salt(body.get(field), body.name(field))


@dataclass(frozen=True)
class FieldTable:
    fields: Mapping[str, ValueKind]
    required: tuple[str, ...] = ()
    ignores_unknown: bool = False

    def read(self, fields: Any, rules: RequestRules) -> Body:
        """A request with its values as they are used, by our names of its fields."""
        body = rules.body(fields)
        found: dict[str, Any] = {}
        sent: dict[str, str] = {}
        self._put_into(found, sent, body, self.check(body, rules))
        return body.renamed(found, sent)

    def check(self, body: Body, rules: RequestRules) -> dict[str, Any]:
        """Its values. Raise for a field that is unknown, missing or refused, or a wrong value."""
        if self.ignores_unknown:
            body.ignore_unknown(self.fields)
        else:
            body.check_known(self.fields)
        for name in self.required:
            body.require(name)
        sent = [name for name in body.fields() if name in self.fields and body.has(name)]
        return {name: self.fields[name].check(body, name, rules) for name in sent}

    def _put_into(
        self, found: dict[str, Any], sent: dict[str, str], body: Body, values: dict[str, Any]
    ) -> None:
        for name, value in values.items():
            kind = self.fields[name]
            if kind.answer != "honoured" or value == kind.unset:
                continue
            if isinstance(kind, Members):
                if kind.lifted:
                    kind.table._put_into(found, sent, body.required_object(name), value)
                value = body.get(name)
            ours = kind.ours or name
            if ours in found:
                first, other = sorted((body.name(name), sent[ours]), key=ours.__ne__)
                same = f"{first} and {other} are the same; send one of them"
                raise RequestError(same, param=first)
            sent[ours] = body.name(name)
            found[ours] = kind.convert(value) if kind.convert else value

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
    lifted: bool = False  # they are fields of the request, by our names

    def schema(self, rules: RequestRules) -> Schema:
        return self.table.schema(rules)

    def check(self, body: Body, field: str, rules: RequestRules) -> Any:
        return self.table.check(body.required_object(field), rules)


def members(**fields: ValueKind) -> Members:
    return Members(f"an object with {', '.join(fields)}", table=FieldTable(fields))


def lifted(**fields: ValueKind) -> Members:
    return replace(members(**fields), lifted=True)


@dataclass(frozen=True)
class Unused(ValueKind):
    """Of a field that has no effect; `neutral` values ask for nothing, and are accepted."""

    neutral: tuple[Any, ...] = ()

    def check(self, body: Body, field: str, rules: RequestRules) -> None:
        value = body.get(field)
        if any(type(value) is type(each) and value == each for each in self.neutral):
            return  # 0 is not false
        if self.answer == "ignored":  # it is listed in a header of the response
            body.ignore(field, self.text)
            return
        name, accepted = body.name(field), " or ".join(map(shown, self.neutral))
        hint = f" (only {accepted} is accepted)" if accepted else ""
        raise UnsupportedField(f"{name} is not supported: {self.text}{hint}", param=name)


def refused_field(why: str, *neutral: Any) -> Unused:
    schema = {"enum": list(neutral), "description": why}
    return Unused(why, json_schema=schema, answer="refused", neutral=neutral)


def ignored_field(why: str, *neutral: Any) -> Unused:
    """It cannot change the reply here."""
    schema = {"description": f"ignored: {why}"}
    return Unused(why, json_schema=schema, answer="ignored", neutral=neutral)


Fields = dict[str, ValueKind]


def pick(fields: Fields, *names: str) -> Fields:
    return {name: fields[name] for name in names}


def conversation(roles: tuple[str, ...], content: Schema, *required: str) -> ValueKind:
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(roles)}, "content": content},
        "required": list(required),
    }
    words = f"a list of 1 to {MAX_MESSAGES:,} messages"
    return ValueKind(words, json_schema=some(message, MAX_MESSAGES))


def some(items: Schema, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


MODEL: Fields = {"model": ModelName("a name in `/v1/models`")}
EFFORT = one_of(*EFFORTS)
TOOLS: Fields = {
    "tools": ValueKind(
        f"a list of at most {MAX_TOOLS:,} tools",
        Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)],
    )
}
# Of every dialect, by the names of `SamplingParams`, which are made of them: a new field is a row.
SAMPLING: Fields = {
    "min_tokens": integer_from(0),
    "temperature": number_from(0, 2),
    "top_p": number_from(0, 1, above=True),
    "top_k": integer_from(-1, convert=lambda top_k: max(0, top_k)),  # -1 is "all" elsewhere
    "min_p": number_from(0, 1),
    "repetition_penalty": number_from(0, above=True),
    "presence_penalty": number_from(-2, 2),
    "frequency_penalty": number_from(-2, 2),
    "logit_bias": LogitBias(),
    "seed": integer_from(-MAX_SEED - 1, MAX_SEED - MAX_CHOICES),
    "stop": ByRules(
        kind=_stop_strings,
        convert=lambda given: (given,) if isinstance(given, str) else tuple(given),
    ),
    "stop_token_ids": ByRules(
        kind=lambda rules: token_ids(rules, MAX_STOP_TOKEN_IDS),
        convert=lambda ids: tuple(dict.fromkeys(ids)),
    ),
    "ignore_eos": BOOLEAN,
    "speculate": BOOLEAN,
}
CHOICES: Fields = {"n": integer_from(1, MAX_CHOICES)}
STRUCTURE: Fields = {
    "json_schema": ValueKind("a JSON Schema, or its JSON", dict[str, Any] | str),
    "regex": STRING,
    "ebnf": STRING,
}
SERVING: Fields = {  # of every request that is run
    "timeout": number_from(0, above=True),
    "priority": integer_from(-MAX_PRIORITY, MAX_PRIORITY),
    "cache_salt": Salt(
        f"a string of 1 to {MAX_SALT_CHARS:,} characters",
        json_schema={"type": "string", "minLength": 1, "maxLength": MAX_SALT_CHARS},
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
    **CHOICES,
    **STRUCTURE,
    **STREAM,
    **STREAM_OPTIONS,
    "response_format": ValueKind(
        "an object with a `type` of text, json_object or json_schema",
        json_schema={
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
    ),
    **USER,
    **SERVING,
}
