"""The statuses of several engines as one. Knows no field of a status but those that are no sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

SHARE = "_share"  # of time: the mean
QUOTIENTS = {"hit_rate": ("tokens_matched", "tokens_looked_up")}


def merged_status(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers are summed, shares are means, lists of numbers are summed by position; other lists
    are joined, and of all else the first counts."""
    names = dict.fromkeys(name for status in statuses for name in status)
    merged = {
        name: _merged(name, [status[name] for status in statuses if name in status])
        for name in names
    }
    for name, (part, whole) in QUOTIENTS.items():
        if name in merged:
            merged[name] = merged[part] / max(merged[whole], 1)
    return merged


def _merged(name: str, values: list[Any]) -> Any:
    values = [value for value in values if value is not None]
    if all(isinstance(value, dict) for value in values) and values:
        return merged_status(values)
    if all(isinstance(value, list) for value in values) and values:
        if all(_is_number(each) for value in values for each in value):
            return [sum(each) for each in zip_longest(*values, fillvalue=0)]
        return [each for value in values for each in value]
    if all(map(_is_number, values)) and values:
        return sum(values) / len(values) if name.endswith(SHARE) else sum(values)
    return values[0] if values else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
