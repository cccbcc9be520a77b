"""How large a JSON Schema is. Knows no keyword but those that refer, repeat or choose.

Every value counts, wherever it stands: `const` and `default` are read by the same recursive code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pippin.decode.size.references import in_order
from pippin.decode.size.regex_size import check_regex_size
from pippin.decode.size.size_limits import (
    MAX_ALTERNATIVES,
    MAX_OBJECTS,
    MAX_PATTERN_PROPERTIES,
    check_limit,
    check_nesting,
)

_CHOICES = ("enum", "anyOf", "oneOf", "allOf", "type")


def check_json_nesting(value: Any) -> list[Any]:
    """Every object and list in a value of JSON; raises if they are nested too deeply."""
    found: list[Any] = []
    level, depth = _containers([value]), 1
    while level:
        check_nesting(depth)
        found += level
        level, depth = [each for outer in level for each in _containers(_items(outer))], depth + 1
    return found


def check_schema_size(schema: Any) -> None:
    values = check_json_nesting(schema)
    objects = [value for value in values if isinstance(value, dict)]
    check_limit("objects", len(objects), MAX_OBJECTS)
    num_choices = 0
    for each in objects:
        num_choices += sum(len(v) for k in _CHOICES if isinstance(v := each.get(k), list))
        patterns = each.get("patternProperties")
        if isinstance(patterns, dict):
            check_limit("patternProperties of one object", len(patterns), MAX_PATTERN_PROPERTIES)
            for pattern in patterns:
                check_regex_size(pattern)
        if isinstance(pattern := each.get("pattern"), str):
            check_regex_size(pattern)
    check_limit("values and schemas to choose from", num_choices, MAX_ALTERNATIVES)
    _check_references(schema, values)


def _check_references(schema: Any, values: list[Any]) -> None:
    by_id = {id(value): value for value in values}
    anchors = {f"#{name}": id(value) for value in values for name in _anchors(value)}

    def refers(number: int) -> list[int]:
        value = by_id[number]
        inner = [id(item) for item in _containers(_items(value))]
        if isinstance(value, dict) and isinstance(name := value.get("$ref"), str):
            target = anchors.get(name) or id(_pointed_at(schema, name))
            if target in by_id:
                inner.append(target)
        return inner

    in_order(by_id, refers)


def _anchors(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and isinstance(name := value.get("$anchor"), str):
        yield name


def _pointed_at(schema: Any, reference: str) -> Any:
    """What `#/$defs/name` points at; None if that is nothing."""
    found = schema
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 9:
            found = found[int(name)] if int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            return None
    return found


def _items(value: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]
