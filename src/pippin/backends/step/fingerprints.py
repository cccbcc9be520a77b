"""Fingerprints of what the prefix cache holds: steps add words up, the host compares.

One is taken of what a step captures or loads, and again of what a later one restores or spills.
Sums are read with the result of the step where it depends on them, else with a later one's: the
engine never waits for them. Any word that has changed shows; words that are added up together and
have changed places do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pippin.backends.base import Damage, Restore
from pippin.types import Component, Payload


@dataclass(frozen=True)
class Prints:
    """Sums of what a payload holds, or a part of another's: one for each of its tokens or arrays.

    They outlive what was summed: what is evicted before they are read gives its memory back.
    """

    _found: list[np.ndarray] = field(default_factory=list)  # of the whole; none: not known yet
    _start: int = 0
    _end: int | None = None

    @property
    def known(self) -> np.ndarray | None:
        return self._found[0][self._start : self._end] if self._found else None

    def keep(self, found: np.ndarray) -> None:
        self._found[:] = [found]

    def part(self, start: int, end: int) -> Prints:
        return Prints(self._found, self._start + start, self._start + end)


class Printed(Protocol):
    @property
    def prints(self) -> Prints: ...


P = TypeVar("P", bound=Printed)
Reader = Callable[[np.ndarray], None]


class Summed(NamedTuple):
    """Of several payloads, one behind the other."""

    wait: Callable[[], np.ndarray]
    counts: Sequence[int]  # of each


class _Launched(NamedTuple):
    step: int
    due: int  # the step with whose result it is read
    read: Callable[[], None]


class Fingerprints(ABC, Generic[P]):
    def __init__(self) -> None:
        self._now: list[tuple[P, Reader]] = []
        self._later: list[tuple[P, Reader]] = []  # read with a later step's result
        self._launched: list[_Launched] = []
        self._damaged: list[Damage] = []

    def begin(self) -> None:
        """Forget what a step asked for whose launch failed."""
        self._now, self._later = [], []

    def take(self, payload: Payload) -> None:
        """Of what this step makes."""
        self._later += [(owner, owner.prints.keep) for owner in self._owners(payload)]

    def compare(self, payload: Payload, on_change: Callable[[], None]) -> None:
        """What an earlier step made; reported with this one's result."""
        owners = self._owners(payload)
        self._now += [(owner, partial(_compare, owner.prints, on_change)) for owner in owners]

    def compare_restored(
        self, slot: int, restore: Restore, components: Collection[Component], *, later: bool
    ) -> None:
        """`later`: nothing is computed from it before the next step."""
        for component, start, end, payload in restore.placed():
            if component in components:
                note = partial(self.note, Damage(slot, component, start, end))
                asked = self._later if later else self._now
                owners = self._owners(payload)
                asked += [(owner, partial(_compare, owner.prints, note)) for owner in owners]

    def launch(self, step: int, sum_up: Callable[[Sequence[P]], Summed]) -> None:
        """`sum_up`: on the device."""
        for due, asked in ((step, self._now), (step + 1, self._later)):
            if asked:
                summed = sum_up([owner for owner, _ in asked])
                read = partial(_read, summed, [reader for _, reader in asked])
                self._launched.append(_Launched(step, due, read))
        self.begin()

    def forget(self, step: int) -> None:
        """This step is discarded."""
        self._launched = [found for found in self._launched if found.step != step]

    def read(self, step: int) -> tuple[Damage, ...]:
        """What is known when a step has been waited for."""
        if self._launched:
            due = [found for found in self._launched if found.due <= step]
            self._launched = [found for found in self._launched if found.due > step]
            for found in sorted(due, key=lambda found: found.due):
                found.read()
        damaged, self._damaged = tuple(self._damaged), []
        return damaged

    def note(self, damage: Damage) -> None:
        if damage not in self._damaged:
            self._damaged.append(damage)

    @abstractmethod
    def _owners(self, payload: Payload) -> Iterable[P]:
        """What of a payload has a fingerprint."""


def _read(summed: Summed, readers: Sequence[Reader]) -> None:
    found = summed.wait().copy()  # once: each payload keeps a part of it
    ends = np.cumsum(summed.counts)
    for reader, sums in zip(readers, np.split(found, ends[:-1]), strict=True):
        reader(sums)


def _compare(prints: Prints, on_change: Callable[[], None], found: np.ndarray) -> None:
    if (known := prints.known) is not None and not np.array_equal(known, found):
        on_change()
