"""Reads members of a JSON object, with errors that name where they are. Knows no field by name.

As in OpenAI's API, a field that is null counts as left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from pippin.api.requests.leniency import Leniency
from pippin.errors import MAX_SHOWN_CHARS, RequestError, UnsupportedField, cut

T = TypeVar("T")
_INDEX = re.compile(r"\[\d+\]")
_IS_NEAR = 0.75  # of two names, by difflib's ratio


class Body:
    """One JSON object, where it is in the request, and how lenient it is read."""

    def __init__(self, fields: Any, path: str = "", leniency: Leniency | None = None) -> None:
        self.path = path
        self.leniency = leniency or Leniency()
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

    def get(self, field: str, default: Any = None) -> Any:
        value = self._fields.get(field)
        return default if value is None else value

    def has(self, field: str) -> bool:
        return self._fields.get(field) is not None

    def error(self, field: str, what: str) -> RequestError:
        name = self.name(field)
        return RequestError(f"{name} {what}", param=name)

    def wrong(self, field: str, expected: str) -> RequestError:
        return self.error(field, f"is {shown(self.get(field))}; it must be {expected}")

    def unsupported(self, field: str, what: str) -> UnsupportedField:
        name = self.name(field)
        return UnsupportedField(f"{name} is {shown(self.get(field))}; {what}", param=name)

    def require(self, field: str) -> Any:
        if not self.has(field):
            raise self.error(field, "is required")
        return self._fields[field]

    def check_known(self, known: Iterable[str]) -> None:
        known = set(known)
        for field in self._fields:
            if field not in known and self.has(field):
                near = difflib.get_close_matches(field[:MAX_SHOWN_CHARS], known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise self.error(field, f"is not a field of this request{hint}")

    def ignore(self, field: str, why: str, value: str = "") -> None:
        self.leniency.ignore(self.name(field), why, value)

    def ignore_unknown(self, known: Iterable[str]) -> None:
        """For parts of which other servers and clients have further fields."""
        unknown = [field for field in self._fields if field not in known and self.has(field)]
        if unknown:
            place = _INDEX.sub("[]", self.path)
            for field in unknown:
                name = f"{place}.{cut(field)}" if place else cut(field)
                self.leniency.ignore(name, "it is not a field of this object")

    def is_foreign(self, field: str, known: Sequence[str]) -> bool:
        """Whether it names a type of another server's. A misspelt one is refused."""
        value = self.required_string(field)
        if value in known:
            return False
        if near := difflib.get_close_matches(value[:MAX_SHOWN_CHARS], known, 1, _IS_NEAR):
            raise self.unsupported(field, f"did you mean {near[0]}?")
        return True

    def boolean(self, field: str, default: bool) -> bool:
        value = self.get(field, default)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def string(self, field: str, default: T) -> str | T:
        value = self.get(field)
        if value is not None and not isinstance(value, str):
            raise self.wrong(field, "a string")
        return default if value is None else value

    def required_string(self, field: str) -> str:
        self.require(field)
        return self.string(field, "")

    def one_of(self, field: str, choices: Sequence[str]) -> str | None:
        value = self.get(field)
        if value is not None and value not in choices:
            raise self.wrong(field, f"one of {', '.join(choices)}")
        return None if value is None else str(value)

    def object(self, field: str) -> Body | None:
        return self._inner(self.get(field), self.name(field)) if self.has(field) else None

    def required_object(self, field: str) -> Body:
        return self._inner(self.require(field), self.name(field))

    def objects(self, field: str, expected: str = "a list") -> list[Body]:
        value = self.get(field)
        if not isinstance(value, list):
            raise self.wrong(field, expected)
        return [self._inner(item, f"{self.name(field)}[{i}]") for i, item in enumerate(value)]

    def renamed(self, fields: dict[str, Any]) -> Body:
        """The same request, by other names of its fields."""
        return self._inner(fields, self.path)

    def _inner(self, fields: Any, path: str) -> Body:
        return Body(fields, path, self.leniency)


def shown(value: Any) -> str:
    """A value as it was sent, cut short."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_CHARS + 1]
    return cut(msgspec.json.encode(value).decode())
