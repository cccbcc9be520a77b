"""Reads typed, range-checked fields out of a JSON object. Knows no field by name.

As in OpenAI's API, a field that is null counts as left out.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from pippin.api.requests.bounds import MAX_LABEL_CHARS, MAX_STOP_CHARS
from pippin.errors import MAX_SHOWN_CHARS, RequestError, cut

T = TypeVar("T")


class Body:
    """One JSON object and where it is in the request, for error messages."""

    def __init__(self, fields: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(fields, dict):
            raise RequestError(
                f"{path or 'the request body'} is {shown(fields)}; it must be a JSON object",
                param=path or None,
            )
        self._fields: dict[str, Any] = fields

    def __len__(self) -> int:
        return len(self._fields)

    def name(self, field: str) -> str:
        field = cut(field)
        return f"{self.path}.{field}" if self.path else field

    def fields(self) -> Iterable[str]:
        return self._fields.keys()

    def get(self, field: str) -> Any:
        return self._fields.get(field)

    def has(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def wrong(self, field: str, expected: str) -> RequestError:
        name = self.name(field)
        return RequestError(
            f"{name} is {shown(self.get(field))}; it must be {expected}", param=name
        )

    def require(self, field: str) -> Any:
        if not self.has(field):
            name = self.name(field)
            raise RequestError(f"{name} is required", param=name)
        return self._fields[field]

    def check_known(self, known: Iterable[str]) -> None:
        known = set(known)
        for field in self._fields:
            if field not in known and self.has(field):
                near = difflib.get_close_matches(field[:MAX_SHOWN_CHARS], known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                name = self.name(field)
                raise RequestError(f"{name} is not a field of this request{hint}", param=name)

    def number(
        self, field: str, low: float, high: float | None, default: T, *, above_low: bool = False
    ) -> float | T:
        """A number in [low, high]; in (low, high] if it must be `above_low`."""
        if not self.has(field):
            return default
        value = self.get(field)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        most = sys.float_info.max if high is None else high
        if not is_number or not low <= value <= most or (above_low and value == low):
            bound = f"above {low:g}" if above_low else f"from {low:g}"
            limit = "" if high is None else f" {'and at most' if above_low else 'to'} {high:g}"
            raise self.wrong(field, f"a number {bound}{limit}")
        return float(value)

    def integer(self, field: str, low: int, high: int | None, default: T) -> int | T:
        if not self.has(field):
            return default
        value = self.get(field)
        if not is_integer(value) or value < low or (high is not None and value > high):
            limit = f"from {low:,} to {high:,}" if high is not None else f"of at least {low:,}"
            raise self.wrong(field, f"an integer {limit}")
        return int(value)

    def boolean(self, field: str, default: bool) -> bool:
        if not self.has(field):
            return default
        value = self.get(field)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def string(self, field: str, default: T) -> str | T:
        if not self.has(field):
            return default
        value = self.get(field)
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def label(self, field: str, most: int = MAX_LABEL_CHARS) -> str | None:
        """A string that changes no reply: an id, a name, a note for the operator."""
        value = self.string(field, None)
        if value is not None and len(value) > most:
            name = self.name(field)
            raise RequestError(
                f"{name} has {len(value):,} characters; at most {most:,} are allowed", param=name
            )
        return value

    def one_of(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.get(field)
        if value is None:
            return None
        if value not in choices:
            raise self.wrong(field, f"one of {', '.join(choices)}")
        return str(value)

    def strings(self, field: str, most: int, option: str) -> tuple[str, ...]:
        """One string or a list of them, none empty, and not more than `option` allows."""
        value = self.get(field)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if (
            not isinstance(found, list | tuple)
            or len(found) > most
            or not all(isinstance(item, str) and item for item in found)
        ):
            expected = f"a string or a list of at most {most} strings ({option}), none empty"
            raise self.wrong(field, expected)
        if (longest := max(map(len, found), default=0)) > MAX_STOP_CHARS:
            name = self.name(field)
            raise RequestError(
                f"{name} has a string of {longest:,} characters; at most {MAX_STOP_CHARS:,} are "
                "allowed",
                param=name,
            )
        return tuple(found)


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """A value as it was sent, cut short."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
    return cut(msgspec.json.encode(value).decode())
