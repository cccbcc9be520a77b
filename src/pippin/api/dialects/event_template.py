"""An event that is sent for every token, encoded once but for some values. Knows no dialect."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

# Encoded where a value will be. No client can know it: nothing that it sends is mistaken for it.
_MARK = secrets.token_hex(16).encode()
HOLE: Any = msgspec.Raw(_MARK)


class EventTemplate:
    def __init__(self, event: bytes) -> None:
        """`event`: written with HOLE in place of each value that changes."""
        self._head, *self._tails = event.split(_MARK)

    def fill(self, *values: Any) -> bytes:
        event = self._head
        for value, tail in zip(values, self._tails, strict=True):
            event += msgspec.json.encode(value) + tail
        return event
