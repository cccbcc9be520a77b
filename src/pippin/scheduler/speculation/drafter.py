"""What guesses how replies go on. A wrong guess costs time, and never a token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pippin.scheduler.request import Request


@dataclass(frozen=True)
class Guess:
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))  # int32 [n]
    confidence: int = 0  # how often these are right is learnt for each value by itself


NO_GUESS = Guess()


class Drafter(Protocol):
    """On the host."""

    @property
    def name(self) -> str: ...

    def prepare(self, requests: Iterable[Request]) -> None:
        """Some of these are about to be asked for, once a step. Takes bounded time."""
        ...

    def propose(self, request: Request, num_tokens: int) -> Guess:
        """At most `num_tokens` tokens that could follow the request's known ones."""
        ...

    def forget(self, request: Request) -> None:
        """It has ended."""
        ...

    def flush(self) -> None:
        """Forget what requests said that have ended: the cache is flushed."""
        ...


class KeepsNothing:
    """Of requests: a drafter whose proposals depend on nothing that it has to keep."""

    def prepare(self, requests: Iterable[Request]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class DeviceDrafter:
    """What a backend drafts with in its steps, for the next ones: it proposes nothing here."""

    name: str
    max_drafts: int  # that a step leaves for a row's next one
