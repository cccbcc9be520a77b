"""Fingerprints that steps compute, read when their device is done. Knows no arrays and no payloads.

A backend adds up the words of what a step captures or loads, and again of what a later one restores
or spills. Sums that a step makes are read with its own result where the step depends on them, else
with a later one's: the engine never waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pippin.backends.base import Damage


class _Launched(NamedTuple):
    step: int | None  # None: read whatever steps are discarded
    due: int  # the step with whose result it is read
    read: Callable[[], None]


class FingerprintReads:
    def __init__(self) -> None:
        self._launched: list[_Launched] = []
        self._damaged: list[Damage] = []

    def add(self, step: int | None, due: int, read: Callable[[], None]) -> None:
        self._launched.append(_Launched(step, due, read))

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
