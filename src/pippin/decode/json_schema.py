"""Which JSON Schemas can be enforced exactly. Knows no tokens and compiles nothing.

llguidance refuses most keywords that it cannot enforce, but ignores unknown ones, as JSON Schema
allows. A reply could then violate the schema. So a keyword must be enforced or be an annotation,
which constrains no value; every other one is refused by name, unless it can be written as others.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pippin.decode.expressed_schema import NOT_ENFORCED, expressed
from pippin.decode.size.schema_size import check_schema_size
from pippin.decode.size.size_limits import TooLarge
from pippin.errors import RequestError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# How llguidance writes what obeys a schema: in one way, on one line as `json.dumps` does. So the
# text between values is forced, and a model cannot write white space without end.
ONE_LINE: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
MAX_EXACT = 2**53  # llguidance keeps numbers as doubles, and crashes on some near 2**63
MAX_REMAINDERS = 10_000  # compiling a multipleOf of a million takes 16 seconds
MAX_NAME_CHARS = 60  # of a keyword or a property that an error names

# Keywords whose values are schemas, by how they hold them.
_ONE = {"additionalItems", "additionalProperties"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_MAPS = {"$defs", "definitions", "patternProperties", "properties"}
_ENFORCED = {
    *("$anchor", "$id", "$ref", "const", "enum", "id", "items", "type"),
    *("format", "maxLength", "minLength", "pattern"),
    *("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
    *("maxItems", "maxProperties", "minItems", "minProperties", "required"),
}
_ANNOTATIONS = {
    *("$comment", "$schema", "default", "deprecated", "description", "example", "examples"),
    *("readOnly", "title", "writeOnly"),
    # Of OpenAPI, beside a `oneOf` or `anyOf` of the same meaning, or for other validators:
    *("contentEncoding", "contentMediaType", "discriminator", "externalDocs", "xml"),
}
_HOLD_NUMBERS = {
    *("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
}
_KNOWN = _ENFORCED | _ANNOTATIONS | _ONE | _LISTS | _MAPS
_EXTENSION = "x-"  # by custom, for other tools
_OPTIONS = "x-guidance"  # refused: it changes how llguidance reads a schema


Place = tuple["Place", str] | None  # of a schema in the one around it; None: the whole


def check_schema(text: str) -> dict[str, Any]:
    """The schema in `text`, in keywords that are enforced; raises if there is one that cannot be.

    Its nesting is within what recursive code can follow.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(f"json_schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise _refused(f"json_schema is {_kind(schema)}; it must be an object")
    try:
        check_schema_size(schema)
        schema = expressed(schema)
        check_schema_size(schema)
    except TooLarge as error:
        raise _refused(f"json_schema is too large: {error}") from error
    for place, part in _parts(schema):
        for keyword, value in part.items():
            if (why := _why_not(keyword, value, part)) is not None:
                raise _refused(f"json_schema: {_path(place)}: {why}")
    return schema


def _parts(schema: dict[str, Any]) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The schema and all schemas inside it, with where they are."""
    found: list[tuple[Place, Any]] = [(None, schema)]
    while found:
        place, part = found.pop()
        if not isinstance(part, dict):  # true, false, or wrong in a way that llguidance names
            continue
        yield place, part
        found += (((place, name), inner) for name, inner in _inner(part))


def _path(place: Place) -> str:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(_cut(name))
    return ".".join(["$", *reversed(names)])


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in part.items():
        if keyword in _MAPS and isinstance(value, dict):
            yield from ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif (keyword in _LISTS or keyword == "items") and isinstance(value, list):
            yield from ((f"{keyword}[{number}]", inner) for number, inner in enumerate(value))
        elif keyword in _ONE or keyword == "items":
            yield keyword, value


def _why_not(keyword: str, value: Any, part: dict[str, Any]) -> str | None:
    """Why a keyword cannot be enforced; None if it can, as far as this module knows."""
    if keyword not in _KNOWN:
        return _refusal(keyword)
    if keyword in _HOLD_NUMBERS and (number := _inexact(value)) is not None:
        return f"{keyword} holds {number}; beyond {MAX_EXACT:,} numbers are not kept exactly"
    if keyword == "multipleOf" and _num_remainders(value) > MAX_REMAINDERS:
        return f"multipleOf is {value}; at most {MAX_REMAINDERS:,} is supported"
    required = part.get("required")
    most = 1 + (len(required) if isinstance(required, list) else 0)
    if keyword == "minProperties" and isinstance(value, int) and value > most:
        # A reply may repeat a key that is not required: written twice, it counts once.
        return f"minProperties is {value}; it is supported up to one more than what is required"
    return None


def _inexact(value: Any) -> int | None:
    """An integer in `value` that a double cannot be trusted to hold."""
    if isinstance(value, int):
        return value if abs(value) > MAX_EXACT else None
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return None
    return next((found for item in inner if (found := _inexact(item)) is not None), None)


def _num_remainders(value: Any) -> int:
    """How many states it takes to divide by a number: its digits, wherever the point is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0  # wrong in a way that llguidance names
    return int("".join(map(str, Decimal(str(value)).as_tuple().digits)) or "0")


def _refusal(keyword: str) -> str | None:
    """Why an unknown keyword is refused. One that is like no other is an annotation of a program's
    own, as JSON Schema has it: Home Assistant writes `strict` into its schemas."""
    keyword = _cut(keyword)
    if keyword in NOT_ENFORCED:
        return f"the keyword {keyword} is not supported"
    if keyword.startswith(_EXTENSION) and keyword != _OPTIONS:
        return None
    near = difflib.get_close_matches(keyword, _KNOWN | NOT_ENFORCED | {_OPTIONS}, n=1)
    return f"{keyword} is not a keyword of JSON Schema; did you mean {near[0]}?" if near else None


def _refused(message: str) -> RequestError:
    return RequestError(message, param="json_schema")


def _kind(value: Any) -> str:
    names = {bool: "a boolean", str: "a string", list: "a list", type(None): "null"}
    return names.get(type(value), "a number")
