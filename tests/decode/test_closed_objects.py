"""Objects that a schema leaves open hold what it declares; nothing becomes impossible by it."""

from __future__ import annotations

from typing import Any

import pytest

from cases import cases
from pippin.decode.json_schema import closed

ONE = {"properties": {"a": {"type": "integer"}}}
SHUT = ONE | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ONE, SHUT),
        ({"items": ONE}, {"items": SHUT}),
        ({"anyOf": [ONE, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": ONE}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"allOf": [ONE]}, {"allOf": [SHUT]}),  # pydantic's way to describe a reference
        ({"properties": {"b": ONE}}, {"properties": {"b": SHUT}, "additionalProperties": False}),
    ],
)
def test_what_is_left_open_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@cases(
    "schema",
    [
        {"type": "object"},
        ONE | {"additionalProperties": True},
        ONE | {"additionalProperties": {"type": "string"}},
        ONE | {"patternProperties": {"^x": {}}},
        ONE | {"minProperties": 2},
        ONE | {"required": ["b"]},
        {"allOf": [ONE, {"properties": {"b": {}}}]},
        {"items": ONE, "additionalItems": {"allOf": [ONE, {"required": ["b"]}]}},
        ONE | {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"properties": {}},
        True,
    ],
)
def test_what_says_otherwise_or_is_combined_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
