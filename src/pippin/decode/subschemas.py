"""Where a JSON Schema holds others, and a copy with those changed. Knows no keyword's use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
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
