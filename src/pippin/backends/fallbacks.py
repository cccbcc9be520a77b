"""Work that a backend does in a slower way than it could: noted with the reason, logged once.

`/status` reports what was noted, and `pippin doctor` prints it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fallback:
    operation: str  # what is slower, and what is used for it
    reason: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.reason}"


class Fallbacks:
    """Of one backend, in the order in which they were noted."""

    def __init__(self) -> None:
        self._noted: dict[Fallback, None] = {}

    def __iter__(self) -> Iterator[Fallback]:
        return iter(tuple(self._noted))

    def note(self, operation: str, reason: object, error: BaseException | None = None) -> None:
        """`error`: its traceback is logged too."""
        found = Fallback(operation, str(reason))
        if found not in self._noted:
            self._noted[found] = None
            logger.warning("%s", found, exc_info=error)


_active: ContextVar[Fallbacks | None] = ContextVar("fallbacks", default=None)


@contextmanager
def noted_in(fallbacks: Fallbacks) -> Iterator[None]:
    """What is noted by `note_fallback` meanwhile: choices that know no backend."""
    token = _active.set(fallbacks)
    try:
        yield
    finally:
        _active.reset(token)


def note_fallback(operation: str, reason: object, error: BaseException | None = None) -> None:
    active = _active.get()
    (Fallbacks() if active is None else active).note(operation, reason, error)
