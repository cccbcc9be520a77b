"""What steps with drafts take, from what such steps took. Assumes no formula; reads no clock.

For about so many rows, the steps seen are points, one for about so many drafts. Between two points
costs are on a line, and behind the last one they go on as before it: too cheap, where a device has
a limit there. Then a step shows it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from pippin.scheduler.pacing.costs import size_class

LEAST_SEEN = 2  # steps with drafts before they count: the first of a size may compile,
LEAST_PLAIN = 3  # and of those without, which all others are compared with
RECENT = 5  # steps with drafts that are remembered of a size,
RECENT_PLAIN = 16  # and without
FORGOTTEN = 1024  # steps after which a size that was not seen again is forgotten
FIRST_SLOPE = 0.05  # of a step, for a draft in each row: before any was seen


@dataclass
class _Point:
    drafts: float = 0.0  # of the last step
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    seen_at: int = 0

    @property
    def known(self) -> bool:
        return len(self.seconds) >= (LEAST_SEEN if self.drafts else LEAST_PLAIN)


class DraftCosts:
    def __init__(self) -> None:
        self._points: dict[int, dict[int, _Point]] = {}  # by about so many rows, and drafts
        self._num_seen = 0

    def observe(self, rows: float, drafts: float, seconds: float) -> None:
        """A step, or the mean of a few."""
        self._num_seen += 1
        points = self._points.setdefault(size_class(round(rows)), {})
        size = size_class(round(drafts))
        if size not in points:
            recent = RECENT if drafts else RECENT_PLAIN
            points[size] = _Point(seconds=deque(maxlen=recent))
        point = points[size]
        point.drafts, point.seen_at = drafts, self._num_seen
        point.seconds.append(seconds)

    def plain(self, rows: float) -> float | None:
        """Seconds of a step without drafts; None if unknown."""
        point = self._points.get(size_class(round(rows)), {}).get(size_class(0))
        return median(point.seconds) if point is not None and point.known else None

    def num_since_plain(self, rows: int) -> int:
        """Steps since one without drafts was seen, of about so many rows; more if few were."""
        point = self._points[size_class(rows)][size_class(0)]
        return (self._num_seen - point.seen_at) * RECENT_PLAIN // len(point.seconds)

    def most_known(self, rows: int) -> int:
        """Drafts of the largest step that is known, of about so many rows."""
        points = self._points.get(size_class(rows), {}).values()
        return max((math.ceil(point.drafts) for point in points if point.known), default=0)

    def seconds(self, rows: int, most: int) -> np.ndarray:
        """Of steps with 0 to `most` drafts, float64 [most + 1]; what they take without is known."""
        plain = self.plain(rows)
        assert plain is not None
        points = self._points[size_class(rows)]
        for size in [s for s, p in points.items() if p.drafts and self._is_old(p)]:
            del points[size]
        known = sorted((p.drafts, median(p.seconds)) for p in points.values() if p.known)
        at = np.array([drafts for drafts, _ in known])
        took = np.maximum.accumulate([seconds for _, seconds in known])
        number = np.arange(most + 1)
        found = np.interp(number, at, took)
        slope = FIRST_SLOPE * plain / rows
        if len(known) > 1:
            slope = float((took[-1] - took[-2]) / (at[-1] - at[-2]))
        return np.asarray(found + slope * np.maximum(0.0, number - at[-1]))

    def _is_old(self, point: _Point) -> bool:
        return self._num_seen - point.seen_at > FORGOTTEN
