"""A table of fields: checks a request, and describes it as JSON Schema. Knows no dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pippin.api.fields.value_kinds import Answer, Schema, ValueKind, nullable
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body, shown
from pippin.errors import UnsupportedField


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
