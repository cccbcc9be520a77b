"""Converts arguments written as bare text to JSON of the types in a tool's schema.

Numbers keep the digits that were written: none becomes a float.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from pippin.text.lexer import Steps
from pippin.text.parsers.base import PieceSink
from pippin.text.parsers.json_calls import is_json

_MAX_REFERENCES = 16  # a schema may refer to itself
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
# Templates write what Python prints.
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_TYPE_OF_CONSTANT = {"true": "boolean", "false": "boolean", "null": "null"}
_TYPE_OF_VALUE = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def argument_types(function: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """The JSON types that a function's argument may have; empty where nothing is declared."""
    schema = (function or {}).get("parameters")
    if not isinstance(schema, Mapping):
        return frozenset()
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(declared, schema, _MAX_REFERENCES))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return set()
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else _items(declared)
    found = {name for name in names if isinstance(name, str)}
    if not found:
        values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        found = {_TYPE_OF_VALUE[type(value)] for value in values if type(value) in _TYPE_OF_VALUE}
    if found and schema.get("nullable") is True:  # OpenAPI's
        found.add("null")
    for keyword in ("anyOf", "oneOf", "allOf"):
        for option in _items(schema.get(keyword)):
            found |= _types(option, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str):
        found |= _types(_resolve(reference, root), root, depth - 1)
    return {"number" if type == "integer" else type for type in found}


def _items(value: Any) -> list[Any]:
    """A schema is a client's: what should be a list may be anything."""
    return value if isinstance(value, list) else []


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference inside of the same schema means; None if it leads out of it."""
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: frozenset[str]) -> str:
    """The text of a JSON value of one of these types, or a string if it can be none of them.

    The type of an argument that was not declared is unknown: if its text is JSON, it stays JSON.
    """
    bare = text.strip()
    if (not types or "number" in types) and _NUMBER.fullmatch(bare):
        return bare
    constant = _CONSTANTS.get(bare.lower())
    if constant is not None and (
        _TYPE_OF_CONSTANT[constant] in types or (not types and bare == constant)
    ):
        return constant
    if bare[:1] in ("{", "[") and (not types or types & {"object", "array"}):
        return _container(bare) or json.dumps(text, ensure_ascii=False)
    if not types and bare[:1] == '"' and is_json(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """As part of a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def unquoted(sink: PieceSink, string: Steps[None], types: frozenset[str]) -> Steps[None]:
    """A string of JSON that is being read; where none is allowed, the value that is written in it.

    Some templates put every value of a call into quotes.
    """
    if not types or "string" in types:
        yield from string
        return
    sink.hold_arguments()
    yield from string
    written = sink.take_held_arguments()
    value = as_json(json.loads(written), types)
    sink.arguments(written if value.startswith('"') else value)


def _container(text: str) -> str | None:
    if is_json(text):
        return text
    try:
        written = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        written.encode()  # half of a pair of surrogates cannot be sent
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return written if is_json(written) else None
