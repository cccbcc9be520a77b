"""Which JSON Schemas can be enforced exactly.

llguidance refuses most keywords that it cannot enforce, but ignores unknown ones, as JSON Schema
allows. A reply could then violate the schema. So a keyword must be enforced or be an annotation,
which constrains no value; every other one is refused by name, unless it can be written as others.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, regex_to_lark

from pippin.decode.size import TooLarge, check_schema_size
from pippin.errors import RequestError
from pippin.types import GrammarPart

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


Schema = dict[str, Any]
# Keywords whose values are schemas, by how they hold them.
ONE = ("additionalItems", "additionalProperties", "items")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
MAPS = ("$defs", "definitions", "patternProperties", "properties")


def with_subschemas(schema: Schema, work: Callable[[Any], Any]) -> Schema:
    """A copy in which `work` was done on every schema directly inside."""
    found: Schema = dict(schema)
    for key in MAPS:
        if isinstance(inner := found.get(key), dict):
            found[key] = {name: work(each) for name, each in inner.items()}
    for key in LISTS:
        if isinstance(inner := found.get(key), list):
            found[key] = [work(each) for each in inner]
    for key in ONE:
        if isinstance(inner := found.get(key), dict):
            found[key] = work(inner)
    return found


# With one of these the schema itself decides what an object may hold besides its properties.
_DECIDES = ("additionalProperties", "patternProperties", "minProperties")
_CLOSING = ("allOf", "anyOf", "oneOf", "$ref")


def closed(schema: Any) -> Any:
    """The schema, closed; unchanged where it combines schemas, which would exclude each other.

    Recurses: the nesting must have been checked (`check_schema`).
    """
    return schema if _combines(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = with_subschemas(schema, _closed)
    if _is_complete(found):
        found["additionalProperties"] = False
    return found


def _is_complete(schema: Schema) -> bool:
    """Whether its properties are all that an object needs."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    return all(name in properties for name in required) and not any(k in schema for k in _DECIDES)


def _combines(schema: Any) -> bool:
    """Whether an object may have to be of several schemas at once, somewhere."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    several = isinstance(parts := schema.get("allOf"), list) and len(parts) > 1
    beside = "properties" in schema and any(key in schema for key in _CLOSING)
    return several or beside or any(map(_combines, schema.values()))


# Assertions of JSON Schema that nothing here or in llguidance enforces in general.
NOT_ENFORCED = frozenset(
    {
        *("$dynamicAnchor", "$dynamicRef", "$recursiveRef", "$vocabulary", "contains"),
        *("contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if"),
        *("maxContains", "minContains", "not", "nullable", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    }
)
FORMATS = [
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
]
_OF_THE_DOCUMENT = ("$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "id")
_COMBINED = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
_NOT_EXPRESSED = ("description", "examples", "title")
_DEFINITIONS = (("#", "$defs"), ("#", "definitions"))

Report = Callable[[str], None]  # of a keyword


def expressed(schema: Schema, leave_out: Report | None = None) -> Schema:
    """The schema in keywords that are enforced; `leave_out` is called with those that cannot be.

    Recurses: the nesting must have been checked.
    """

    def rewritten(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        found = with_subschemas(part, rewritten)
        if found.get("uniqueItems") is False or found.get("maxItems") in (0, 1):
            found.pop("uniqueItems", None)
        if "propertyNames" in found:
            _property_names(found, schema)
        if "unevaluatedProperties" in found:
            _unevaluated_properties(found)
        if leave_out is not None:
            for keyword in [key for key in found if _is_lost(key, found)]:
                del found[keyword]
                leave_out(keyword)
        return _nullable(found) if "nullable" in found else found

    return rewritten(schema)  # type: ignore[no-any-return]


def _property_names(found: Schema, root: Schema) -> None:
    """Names that obey a rule are those of a pattern."""
    declares_none = found.keys().isdisjoint(("properties", "patternProperties"))
    names = _name_rules(found["propertyNames"], root)
    if names == {} or (found.get("additionalProperties") is False and declares_none):
        del found["propertyNames"]
        return
    is_map = found.get("type") == "object" and found.keys().isdisjoint(_COMBINED)
    values = found.get("additionalProperties", {})
    pattern = None if names is None else _pattern_of_names(names)
    if is_map and declares_none and pattern is not None and isinstance(values, dict | bool):
        found["patternProperties"] = {pattern: values}
        found["additionalProperties"] = False
        del found["propertyNames"]


def _name_rules(names: Any, root: Schema) -> Schema | None:
    """What a name must obey, without what every name does; None if it is no schema."""
    if names is True:
        return {}
    if isinstance(names, dict) and names.keys() == {"$ref"}:
        start, place, name = [*str(names["$ref"]).split("/", 2), "", ""][:3]
        definitions = root.get(place) if (start, place) in _DEFINITIONS else None
        names = definitions.get(name) if isinstance(definitions, dict) else None
    if not isinstance(names, dict):
        return None
    rules = {key: value for key, value in names.items() if key not in _NOT_EXPRESSED}
    if rules.get("type") == "string":
        del rules["type"]
    return rules


def _pattern_of_names(names: Schema) -> str | None:
    values = [names["const"]] if names.keys() == {"const"} else names.get("enum")
    if names.keys() in ({"const"}, {"enum"}) and isinstance(values, list):
        if not values or not all(isinstance(value, str) for value in values):
            return None
        return f"^({'|'.join(map(re.escape, values))})$"
    if names.keys() == {"pattern"}:
        return names["pattern"] if isinstance(names["pattern"], str) else None
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"} and _is_count(least):
        return f"^(.|\\n){{{least},{most}}}$" if most == "" or _is_count(most) else None
    return None


def _is_lost(keyword: str, schema: Schema) -> bool:
    if keyword == "format":
        types = schema.get("type", "string")
        of_strings = "string" in (types if isinstance(types, list) else [types])
        return of_strings and schema["format"] not in FORMATS
    return keyword in NOT_ENFORCED and keyword != "nullable"


def _nullable(schema: Schema) -> Schema:
    """OpenAPI's: the type, or null."""
    rest = {key: value for key, value in schema.items() if key != "nullable"}
    if schema["nullable"] is not True or rest.keys() <= {*_OF_THE_DOCUMENT, *_NOT_EXPRESSED}:
        return rest
    if isinstance(rest.get("type"), str) and rest.keys().isdisjoint(("enum", "const", *_COMBINED)):
        return rest if rest["type"] == "null" else {**rest, "type": [rest["type"], "null"]}
    whole = {key: rest.pop(key) for key in _OF_THE_DOCUMENT if key in rest}
    return {**whole, "anyOf": [rest, {"type": "null"}]}


def _unevaluated_properties(found: Schema) -> None:
    if found["unevaluatedProperties"] not in (True, {}):
        if not found.keys().isdisjoint(_COMBINED):
            return
        found.setdefault("additionalProperties", found["unevaluatedProperties"])
    del found["unevaluatedProperties"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


ASCII_CLASSES = "dw"  # digits and word characters are those of ASCII, as in a schema's patterns
MAX_MESSAGE_CHARS = 500


def regex_terminal(regex: str) -> str:
    """A regular expression as Lark writes it."""
    return f"/(?:{regex_to_lark(regex, ASCII_CLASSES)})/"


def _bare_terminal(regex: str) -> str:
    """Without the group around it, which `a)|(b` would close."""
    return f"/{regex_to_lark(regex, ASCII_CLASSES)}/" if regex else regex_terminal(regex)


def check_part(part: GrammarPart) -> None:
    """Raises if it is no grammar by itself. Compiles it: call it in a child process only."""
    lark = part.text if part.syntax == "lark" else f"start: {_bare_terminal(part.text)}"
    _, complaints = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(lark))
    if complaints:
        raise RequestError(f"{part.field}: {in_one_line(complaints[0])}", param=part.field)


def in_one_line(message: str) -> str:
    """A message of llguidance's, for an error."""
    lines = (line.strip() for line in message.replace("<non-verbose/>", "").splitlines())
    text = " ".join(line for line in lines if line)[:MAX_MESSAGE_CHARS]
    return "no reply can match it" if text == "NoExtensionBias" else text  # all that it reports


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
_KNOWN = {*_ENFORCED, *_ANNOTATIONS, *ONE, *LISTS, *MAPS}
_EXTENSION = "x-"  # by custom, for other tools
_OPTIONS = "x-guidance"  # refused: it changes how llguidance reads a schema


_Path = tuple["_Path | None", str]  # of a schema in the one around it, and its name there


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
    # Schemas with their names, which end where another begins: a chain, because names may be long.
    found: list[tuple[_Path, Any]] = [((None, "$"), schema)]
    while found:
        path, part = found.pop()
        if not isinstance(part, dict):  # true, false, or wrong in a way that llguidance names
            continue
        for keyword, value in part.items():
            if (why := _why_not(keyword, value, part)) is not None:
                raise _refused(f"json_schema: {_written(path)}: {why}")
        found += (((path, name), inner) for name, inner in _inner(part))
    return schema


def _written(path: _Path) -> str:
    outer, name = path
    before = "" if outer is None else f"{_written(outer)}."
    return before + _cut(name)


def _cut(name: str) -> str:
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."


def _inner(part: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in part.items():
        if keyword in MAPS and isinstance(value, dict):
            yield from ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in LISTS and isinstance(value, list):
            yield from ((f"{keyword}[{number}]", inner) for number, inner in enumerate(value))
        elif keyword in ONE:
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
