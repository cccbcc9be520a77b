"""Launches copies of what rows hold, a part at a time. Knows no rows.

An old array is released when its successor is launched. mlx allocates an array when an operation is
launched, long before it runs, so where much is moved the host waits for the device now and then:
rows are not in memory twice.
"""

from __future__ import annotations

from collections import deque

import mlx.core as mx

SMALL_MOVE_BYTES = 32 << 20  # up to this nothing is waited for
SMALL_TABLE_BYTES = 2 << 20  # likewise, where the step before holds all rows until its end
AHEAD_DIVISOR = 8  # of what is moved, this part may be in flight


class PacedLaunch:
    """Waits so that only a part of what is launched is in flight."""

    def __init__(
        self, total_bytes: int, allowed_bytes: int = 0, *, has_table: bool = False
    ) -> None:
        """`allowed_bytes`: that may be in flight in any case."""
        small = SMALL_TABLE_BYTES if has_table else SMALL_MOVE_BYTES
        self._most_bytes = max(total_bytes // AHEAD_DIVISOR, allowed_bytes)
        self._waits = total_bytes > max(small, allowed_bytes)
        self._in_flight: deque[list[mx.array]] = deque()

    def launch(self, arrays: list[mx.array]) -> None:
        if not self._waits:
            return  # it is launched with the step that follows
        self._in_flight.append(arrays)
        while len(self._in_flight) > 1 and self._bytes_in_flight > self._most_bytes:
            mx.eval(*self._in_flight.popleft())
        mx.async_eval(*arrays)

    @property
    def _bytes_in_flight(self) -> int:
        return sum(array.nbytes for part in self._in_flight for array in part)
