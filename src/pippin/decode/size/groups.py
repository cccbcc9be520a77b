"""Counts what a text names once its repetitions are written out. Knows no language.

a (b c{3}){10}      a once, b 10 times, c 30 times
"""

from __future__ import annotations

from collections.abc import Iterator

from pippin.decode.size.size_limits import MAX_EXPANSION, check_nesting

MOST = MAX_EXPANSION + 1  # larger numbers count as equal


class Groups:
    """Filled in the order of the text."""

    def __init__(self) -> None:
        self._parents = [0]
        self._counts = [1]  # how often a group or an atom is repeated
        self._atoms: list[tuple[int, str | None, int]] = []
        self._open = [0]
        self._last = 0

    def open(self) -> None:
        self._open.append(self._new())
        check_nesting(len(self._open) - 1)

    def close(self) -> None:
        if len(self._open) > 1:  # else llguidance reports it: nothing is open
            self._last = self._open.pop()

    def add(self, name: str | None = None, size: int = 1) -> None:
        """An atom: a reference, or so many characters."""
        self._last = self._new()
        self._atoms.append((self._last, name, size))

    def repeat(self, times: str) -> None:
        """Repeat the last group or atom. `times` are digits."""
        count = MOST if len(times) > len(str(MOST)) else int(times or 1)
        self._counts[self._last] = min(MOST, self._counts[self._last] * max(1, count))

    def written_out(self) -> Iterator[tuple[str | None, int]]:
        """Each atom, and its size times its repetitions."""
        total = list(self._counts)
        for node in range(1, len(total)):
            total[node] = min(MOST, total[node] * total[self._parents[node]])
        for node, name, size in self._atoms:
            yield name, min(MOST, total[node] * size)

    def _new(self) -> int:
        self._parents.append(self._open[-1])
        self._counts.append(1)
        return len(self._counts) - 1
