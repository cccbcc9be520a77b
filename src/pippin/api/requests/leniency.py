"""What a request asked for in vain, since it cannot change the reply here. Knows no field by name.

Such a field is ignored and listed in a header of the response, or refused with --strict-fields.
"""

from __future__ import annotations

import re

from pippin.errors import UnsupportedField, cut

MAX_NAMES = 32
MAX_HEADER_CHARS = 1_000
MORE = "..."
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # a client's text must not end or split a header


class Leniency:
    """How lenient one request is read, and what was ignored: each name once, in order."""

    def __init__(self, *, strict_fields: bool = False, refuses_images: bool = False) -> None:
        self._strict = strict_fields
        self._refuses_images = refuses_images
        self.omitted: list[str] = []  # pictures and files, for the reply's own body
        self._names: dict[str, None] = {}
        self._num_chars = 0
        self._is_full = False

    def ignore(self, name: str, why: str, value: str = "") -> None:
        if self._strict:
            sent = f" ({cut(value)})" if value else ""
            raise UnsupportedField(
                f"{name}{sent} is not supported: {why} (--strict-fields)", param=name
            )
        self._add(name, value)

    def omit(self, name: str, kind: str) -> None:
        """A picture or a file, which a placeholder replaces."""
        if self._refuses_images:
            raise UnsupportedField(
                f"{name} is of the type {kind}; this model reads text only (--images refuse)",
                param=name,
            )
        if (entry := self._add(name, kind)) is not None:
            self.omitted.append(entry)

    def header(self) -> str:
        return ", ".join([*self._names, *[MORE] * self._is_full])

    def _add(self, name: str, value: str) -> str | None:
        """The entry, if it is a new one that fits."""
        if self._is_full:
            return None
        entry = _plain(name) + (f" ({_plain(value)})" if value else "")
        if entry in self._names:
            return None
        num_chars = self._num_chars + len(entry) + len(", ")
        if len(self._names) == MAX_NAMES or num_chars > MAX_HEADER_CHARS - len(MORE):
            self._is_full = True
            return None
        self._names[entry] = None
        self._num_chars = num_chars
        return entry


def _plain(text: str) -> str:
    return _NOT_PLAIN.sub("?", cut(text))
