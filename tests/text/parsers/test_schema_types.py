"""What a tool's schema says of an argument, and bare text as JSON of that type."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cases import cases
from pippin.text.parsers.schema_types import argument_types, as_json


@cases(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"type": "string", "enum": ["a", "1"]}, {"string"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "array"}, {"oneOf": [{"type": "object"}]}]}, {"array", "object"}),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, {"string"}),
        ({"$ref": "#/$defs/word"}, {"string"}),
        ({"$ref": "#/$defs/tree"}, {"object"}),
        ({"$ref": "#/$defs/absent"}, set()),
        ({"$ref": "https://example.com/schema"}, set()),
        ({"$ref": "#/$defs/loop"}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
        ({"type": 5, "enum": 7, "anyOf": None, "$ref": []}, set()),
        ({"type": [["string"], "null"]}, {"null"}),
    ],
)
def test_types_of_an_argument(schema: Any, types: set[str]) -> None:
    definitions = {
        "word": {"type": "string"},
        "tree": {"anyOf": [{"type": "object"}, {"$ref": "#/$defs/tree"}]},
        "loop": {"$ref": "#/$defs/loop"},
    }
    parameters = {"properties": {"a": schema}, "$defs": definitions}
    assert argument_types({"parameters": parameters}, "a") == types


@pytest.mark.parametrize(
    "function", [None, {}, {"parameters": None}, {"parameters": {"properties": []}}]
)
def test_a_function_without_a_schema_declares_nothing(function: Any) -> None:
    assert argument_types(function, "a") == frozenset()


@cases(
    ("text", "types", "written"),
    [
        ("12345678901234567890", {"number"}, "12345678901234567890"),
        (" 1.50e3\n", {"number"}, "1.50e3"),
        ("01", {"number"}, '"01"'),
        ("NaN", {"number"}, '"NaN"'),
        ("12", {"string"}, '"12"'),
        ("12", {"string", "number"}, "12"),
        ("FALSE", {"boolean"}, "false"),
        ("yes", {"boolean"}, '"yes"'),
        ("None", {"string", "null"}, "null"),
        ("None", {"string"}, '"None"'),
        ("None", set(), '"None"'),
        ("null", set(), "null"),
        ('"quoted"', set(), '"quoted"'),
        ("[1, 2", {"array"}, '"[1, 2"'),
        ("(1, 2)", {"array"}, '"(1, 2)"'),
        ("['a', None]", {"array"}, '["a", null]'),
        ("{1: {2}}", {"object"}, '"{1: {2}}"'),  # Python, but nothing that JSON can say
        ('{"a": 1}', {"string"}, '"{\\"a\\": 1}"'),
        ("", {"number"}, '""'),
    ],
)
def test_bare_text_as_json(text: str, types: set[str], written: str) -> None:
    assert as_json(text, frozenset(types)) == written


def test_half_of_a_pair_of_surrogates_is_never_written() -> None:
    """Nothing with one can be sent: what Python would read as one stays as it was written."""
    text = r"['\ud83d', 1]"
    written = as_json(text, frozenset({"array"}))
    assert json.loads(written) == text
    assert written.encode()
