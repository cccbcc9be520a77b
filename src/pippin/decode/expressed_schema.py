"""Keywords that llguidance lacks, as others of the same meaning. Knows no tokens, compiles nothing.

nullable                a further type, or a choice
uniqueItems             of a few constants: an enum of all arrays of them
propertyNames           constants: properties; a pattern or a length: patternProperties
unevaluatedProperties   additionalProperties, where nothing is combined

What has no equal stays, to be refused by name, or is left out where the caller asks for that: a
reply then obeys the rest of the schema.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

from pippin.decode.subschemas import Schema, with_subschemas

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
# What rewriting may add to one schema:
MAX_ARRANGEMENTS = 1_000  # arrays of constants; 1,000 take 0.2 s to compile
MAX_ADDED_CHARS = 100_000
_OF_THE_DOCUMENT = ("$anchor", "$comment", "$defs", "$id", "$schema", "definitions", "id")
_COMBINED = ("$ref", "allOf", "anyOf", "dependentSchemas", "if", "oneOf")
_BESIDE_UNIQUE = {"type", "items", "minItems", "maxItems", "uniqueItems", "description", "title"}
_ANNOTATIONS = ("description", "examples", "title")

Report = Callable[[str], None]  # of a keyword


def expressed(schema: Schema, leave_out: Report | None = None) -> Schema:
    """The schema in keywords that are enforced; `leave_out` is called with those that cannot be.

    Recurses: the nesting must have been checked.
    """
    return _Rewriter(schema, leave_out).rewritten(schema)  # type: ignore[no-any-return]


class _Rewriter:
    def __init__(self, root: Schema, leave_out: Report | None) -> None:
        self._root = root
        self._leave_out = leave_out
        self._arrangements_left = MAX_ARRANGEMENTS
        self._chars_left = MAX_ADDED_CHARS

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = with_subschemas(schema, self.rewritten)
        if "uniqueItems" in found:
            self._unique_items(found)
        if "propertyNames" in found:
            self._property_names(found)
        if "unevaluatedProperties" in found:
            _unevaluated_properties(found)
        if self._leave_out is not None:
            for keyword in [key for key in found if _is_lost(key, found)]:
                del found[keyword]
                self._leave_out(keyword)
        return _nullable(found) if "nullable" in found else found

    def _unique_items(self, found: Schema) -> None:
        if found["uniqueItems"] is False or _is_count(found.get("maxItems"), most=1):
            del found["uniqueItems"]
            return
        constants = _constants(found.get("items"))
        if found.get("type") != "array" or not constants or not found.keys() <= _BESIDE_UNIQUE:
            return
        least, most = found.get("minItems", 0), found.get("maxItems", len(constants))
        if not _is_count(least) or not _is_count(most):
            return
        lengths = range(least, min(most, len(constants)) + 1)
        # The number of arrays grows as a factorial does: of many constants not even it is computed.
        if len(constants) > MAX_ARRANGEMENTS or not lengths:
            return
        counts = [math.perm(len(constants), length) for length in lengths]
        longest = max(map(len, map(json.dumps, constants)))
        num_chars = sum(n * length * longest for n, length in zip(counts, lengths, strict=True))
        if sum(counts) > self._arrangements_left or not self._may_add(num_chars):
            return
        self._arrangements_left -= sum(counts)
        arrays = [list(each) for length in lengths for each in permutations(constants, length)]
        for key in ("items", "minItems", "maxItems", "uniqueItems"):
            found.pop(key, None)
        found["enum"] = arrays

    def _property_names(self, found: Schema) -> None:
        names = self._name_rules(found["propertyNames"])
        if names == {} or (found.get("additionalProperties") is False and _declares_none(found)):
            del found["propertyNames"]
            return
        is_map = found.get("type") == "object" and found.keys().isdisjoint(_COMBINED)
        if names is None or not is_map or not _declares_none(found):
            return
        values = found.get("additionalProperties", {})
        values = {} if values is True else values
        if not isinstance(values, dict):
            return
        if (listed := _listed_names(names)) is not None:
            if not self._may_add(len(listed) * len(json.dumps(values))):
                return
            found["properties"] = dict.fromkeys(listed, values)
        elif (pattern := _pattern_of_names(names)) is not None:
            found["patternProperties"] = {pattern: values}
        else:
            return
        found["additionalProperties"] = False
        del found["propertyNames"]

    def _name_rules(self, names: Any) -> Schema | None:
        """What a name must obey, without what every name does; None if it is no schema."""
        if names is True:
            return {}
        if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
            names = self._definition(reference) if len(names) == 1 else None
        if not isinstance(names, dict):
            return None
        rules = {key: value for key, value in names.items() if key not in _ANNOTATIONS}
        if rules.get("type") == "string":
            del rules["type"]
        return rules

    def _definition(self, reference: str) -> Any:
        for place in ("$defs", "definitions"):
            definitions, start = self._root.get(place), f"#/{place}/"
            if reference.startswith(start) and isinstance(definitions, dict):
                return definitions.get(reference.removeprefix(start))
        return None

    def _may_add(self, num_chars: int) -> bool:
        if num_chars > self._chars_left:
            return False
        self._chars_left -= num_chars
        return True


def _is_lost(keyword: str, schema: Schema) -> bool:
    if keyword == "format":
        types = schema.get("type", "string")
        of_strings = "string" in (types if isinstance(types, list) else [types])
        return of_strings and schema["format"] not in FORMATS
    return keyword in NOT_ENFORCED and keyword != "nullable"


def _nullable(schema: Schema) -> Schema:
    """OpenAPI's: the type, or null."""
    rest = {key: value for key, value in schema.items() if key != "nullable"}
    if schema["nullable"] is not True or rest.keys() <= {*_OF_THE_DOCUMENT, *_ANNOTATIONS}:
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


def _constants(items: Any) -> list[Any] | None:
    """The values that an item may have, if they are listed and of one plain type."""
    if not isinstance(items, dict):
        return None
    rules = {key: value for key, value in items.items() if key not in _ANNOTATIONS}
    if rules == {"type": "boolean"}:
        return [False, True]
    kind = rules.pop("type", None)
    if rules.keys() == {"const"}:
        rules = {"enum": [rules["const"]]}
    values = rules.get("enum")
    if rules.keys() != {"enum"} or not isinstance(values, list):
        return None
    types = {"string": str, "integer": int, "boolean": bool}
    if kind is None and values:
        kind = next((name for name, type_ in types.items() if type(values[0]) is type_), None)
    if kind not in types or any(type(value) is not types[kind] for value in values):
        return None
    return list(dict.fromkeys(values))


def _declares_none(schema: Schema) -> bool:
    return schema.keys().isdisjoint(("properties", "patternProperties"))


def _listed_names(names: Schema) -> list[str] | None:
    values = [names["const"]] if names.keys() == {"const"} else names.get("enum")
    if names.keys() not in ({"const"}, {"enum"}) or not isinstance(values, list):
        return None
    return values if all(isinstance(value, str) for value in values) else None


def _pattern_of_names(names: Schema) -> str | None:
    if names.keys() == {"pattern"}:
        return names["pattern"] if isinstance(names["pattern"], str) else None
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"} and _is_count(least):
        return f"^(.|\\n){{{least},{most}}}$" if most == "" or _is_count(most) else None
    return None


def _is_count(value: Any, most: int | None = None) -> bool:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return is_count and (most is None or value <= most)
