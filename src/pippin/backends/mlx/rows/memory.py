"""What running requests occupy, and copies of it, launched a part at a time.

An old array is released when its successor is launched. mlx allocates an array when an operation is
launched, long before it runs, so where much is moved the host waits for the device now and then:
rows are not in memory twice.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.recurrent.replay import kept_bytes

logger = logging.getLogger(__name__)

TAIL = 64  # columns: steps from one move into mains to the next
COLUMN_STEP = 64  # mains are counted in so many columns

IN_FLIGHT = 2  # copies of what each step writes anew: one that is read, one that is written
MOVING_SHARE = 0.3  # of a main: its part of the copies while rows are moved
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Footprint:
    def __init__(self, layout: Layout, max_depth: int = 0) -> None:
        """`max_depth`: of drafts, whose inputs states keep."""
        self._layout = layout
        # Of a token, in the caches of each window.
        self.bytes_by_window = {
            window: sum(cache.nbytes for cache in layout.kv_caches if cache.window == window)
            for window in layout.window_classes
        }
        held = [layout.caches[index] for index in layout.state_indices]
        states = sum(cache.nbytes + kept_bytes(cache, max_depth) for cache in held)
        self.line_bytes = IN_FLIGHT * (TAIL * self.token_bytes + states)

    @property
    def token_bytes(self) -> int:
        return sum(self.bytes_by_window.values())

    def row_bytes(self, num_tokens: int) -> int:
        """At most: its main, padded, and what moving it takes; a line of tails and of states."""
        main = sum(
            _whole(num_tokens if window is None else min(num_tokens, window)) * nbytes
            for window, nbytes in self.bytes_by_window.items()
        )
        return main + int(MOVING_SHARE * main) + self.line_bytes

    def most_bytes(self, max_buffer_bytes: int) -> int:
        """What rows may hold at the most so that none of their arrays, each one side of a cache or
        an entry of a state, takes more than `max_buffer_bytes`. Moves have arrays no larger."""
        shares = [
            prod(shape) * dtype.size / self.bytes_by_window[cache.window]
            for cache in self._layout.kv_caches
            for shape, dtype in zip(cache.shapes, cache.dtypes, strict=True)
        ]
        for index in self._layout.state_indices:
            state = self._layout.caches[index]
            entries = zip(state.shapes, state.dtypes, strict=True)
            shares += [prod(shape) * dtype.size / self.line_bytes for shape, dtype in entries]
        return int(max_buffer_bytes / max(shares, default=1.0))

    def in_arrays_of(self, max_buffer_bytes: int, num_bytes: int, spare_bytes: float) -> int:
        """Of `num_bytes` for rows, beside what is spare, as much as such arrays can hold."""
        most = max(int(self.most_bytes(max_buffer_bytes) - spare_bytes), 0)
        if num_bytes <= most:
            return num_bytes
        logger.warning(
            "requests and the prefix cache have %.2f GB of %.2f GB: with more, an array of theirs "
            "could exceed the %.2f GB that the device allows for one. More --memory does not help",
            *(most / 1e9, num_bytes / 1e9, max_buffer_bytes / 1e9),
        )
        return most


@dataclass
class SpareLimit:
    """How much may be held for no row, so that steps are simple and have few shapes.

    A quarter of it for spare columns and a quarter for lines without a row; the rest is for rows
    that leave before the others are moved.
    """

    footprint: Footprint
    max_bytes: float = math.inf

    @property
    def max_padding(self) -> float:
        """Tokens."""
        return self.max_bytes / 4 / max(self.footprint.token_bytes, 1)

    def width_for(self, num_rows: int) -> int:
        """The narrowest bucket that holds `num_rows`; just as many if the bucket is too wide."""
        width = next((w for w in WIDTHS if w >= num_rows), -(-num_rows // 64) * 64)
        spare = (width - num_rows) * self.footprint.line_bytes
        return width if spare <= self.max_bytes / 4 else num_rows

    def is_exceeded(self, column_bytes: int, num_spare_lines: int) -> bool:
        return column_bytes + num_spare_lines * self.footprint.line_bytes > self.max_bytes


def _whole(num_columns: int) -> int:
    return -(-num_columns // COLUMN_STEP) * COLUMN_STEP


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
