"""Gemma's arguments as rules of a grammar: JSON with bare keys, and strings between marks.

Numbers, booleans and null are written as in JSON, with every keyword of their schema. Other
keywords that cannot be enforced are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pippin.api.grammars.lark import Lark, alternatives, in_order
from pippin.errors import UnsupportedField

Schema = dict[str, Any]
Refuse = Callable[[str], UnsupportedField]
_KEY = r'/[^\s:{}\[\],<>|"]+/'
_SAY_NOTHING = {"title", "description", "default", "examples", "$defs", "definitions"}
_SCALARS = ("integer", "number", "boolean", "null")
_KNOWN = {
    "string": {"type", "enum", "const"},
    "array": {"type", "items"},
    "object": {"type", "properties", "required", "additionalProperties"},
}


class BareKeyRules:
    def __init__(self, lark: Lark, quote: str, refuse: Refuse) -> None:
        self._lark = lark
        self._quote = quote
        self._refuse = refuse
        self._definitions: dict[str, Any] = {}
        self._rules: dict[str, str] = {}  # of definitions, by reference

    def text(self, ended: str) -> str:
        """A string, of which all but the first mark is given."""
        return f"{self._lark.literal(self._quote)} {ended}"

    def any_object(self) -> str:
        return self._members(f"{_KEY} {_literal(':')} {self._any_value()}")

    def object(self, schema: Schema) -> str:
        """The arguments of one function, as its schema wants them."""
        self._rules = {}
        self._definitions = {
            f"#/{place}/{name}": inner
            for place in ("$defs", "definitions")
            for name, inner in schema.get(place, {}).items()
        }
        return self._value(schema, "its parameters")

    def _value(self, schema: Any, where: str) -> str:
        if schema is True or (isinstance(schema, dict) and schema.keys() <= _SAY_NOTHING):
            return self._any_value()
        if not isinstance(schema, dict):
            raise self._refuse(f"{where} is not a schema that can be enforced")
        if "$ref" in schema:
            return self._reference(schema["$ref"], where)
        kind = schema.get("type")
        choices = schema.get("anyOf") or [{**schema, "type": each} for each in _several(kind)]
        if choices:
            return alternatives([self._value(each, where) for each in choices])
        if kind is None and (values := _values(schema)):
            kind = "string" if all(isinstance(each, str) for each in values) else None
            if not any(isinstance(each, str | list | dict) for each in values):
                return self._lark.json(schema)
        if kind in _SCALARS:
            return self._lark.json(schema)
        for keyword in schema:
            if keyword not in _SAY_NOTHING | _KNOWN.get(str(kind), {"type"}):
                raise self._refuse(f"{keyword} of {where}")
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._items(schema.get("items", True), where)
        if kind == "object":
            return self._object(schema, where)
        raise self._refuse(f"the type of {where}")

    def _reference(self, reference: Any, where: str) -> str:
        if reference not in self._definitions:
            raise self._refuse(f"$ref of {where}")
        if reference not in self._rules:
            schema = self._definitions[reference]

            def body(name: str) -> str:
                self._rules[reference] = name
                return self._value(schema, where)

            return self._lark.recursive(body)
        return self._rules[reference]

    def _string(self, schema: Schema) -> str:
        values = _values(schema)
        if not values:
            return self.text(self._lark.until(self._quote))
        return alternatives(
            [self._lark.literal(f"{self._quote}{each}{self._quote}") for each in values]
        )

    def _items(self, items: Any, where: str) -> str:
        item = self._value(items, f"the items of {where}")
        return f"{_literal('[')} ({item} ({_literal(',')} {item})*)? {_literal(']')}"

    def _object(self, schema: Schema, where: str) -> str:
        properties, extra = schema.get("properties"), schema.get("additionalProperties", False)
        if not properties and extra is not False:
            if extra is not True:
                raise self._refuse(f"additionalProperties of {where}")
            return self.any_object()
        if not properties and "additionalProperties" not in schema:
            return self.any_object()
        if extra is not False:
            raise self._refuse(f"additionalProperties of {where}")
        required = schema.get("required", ())
        pairs = [
            (f"{self._lark.literal(f'{key}:')} {self._value(inner, key)}", key in required)
            for key, inner in (properties or {}).items()
        ]
        return f"{_literal('{')} {in_order(self._lark, pairs, ',')} {_literal('}')}"

    def _any_value(self) -> str:
        string = self.text(self._lark.until(self._quote))
        scalar = self._lark.json({"type": ["number", "boolean", "null"]})

        def body(value: str) -> str:
            items = f"{_literal('[')} ({value} ({_literal(',')} {value})*)? {_literal(']')}"
            pair = f"{_KEY} {_literal(':')} {value}"
            return alternatives([string, scalar, items, self._members(pair)])

        return self._lark.recursive(body)

    def _members(self, pair: str) -> str:
        return f"{_literal('{')} ({pair} ({_literal(',')} {pair})*)? {_literal('}')}"


def _values(schema: Schema) -> list[Any]:
    return [schema["const"]] if "const" in schema else schema.get("enum") or []


def _several(kind: Any) -> list[str]:
    return kind if isinstance(kind, list) else []


def _literal(text: str) -> str:
    return f'"{text}"'
