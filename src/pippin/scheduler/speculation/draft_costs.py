"""What steps with drafts take, from what such steps took. Assumes no formula; reads no clock.

For about so many rows, the steps seen are points, one for about so many drafts. Between two points
costs are on a line, and behind the last one they go on as before it: too cheap, where a device has
a limit there. Then a step shows it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

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

    took: float = 0.0  # the lower quartile: what disturbs a step only makes it longer

    def add(self, drafts: float, seconds: float, seen_at: int) -> None:
        self.drafts, self.seen_at = drafts, seen_at
        self.seconds.append(seconds)
        self.took = sorted(self.seconds)[len(self.seconds) // 4]

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
        points[size].add(drafts, seconds, self._num_seen)

    def plain(self, rows: float) -> float | None:
        """Seconds of a step without drafts; None if unknown."""
        point = self._plain_point(rows)
        return None if point is None else point.took

    def plain_mean(self, rows: float) -> float | None:
        """Likewise, the mean: what steps lose or gain in all is compared with it, since a pause of
        the machine meets steps with drafts and without alike."""
        point = self._plain_point(rows)
        return None if point is None else fmean(point.seconds)

    def _plain_point(self, rows: float) -> _Point | None:
        point = self._points.get(size_class(round(rows)), {}).get(size_class(0))
        return point if point is not None and point.known else None

    def num_since_plain(self, rows: int) -> int:
        """Steps since one without drafts was seen, of about so many rows; more if few were."""
        point = self._points[size_class(rows)][size_class(0)]
        return (self._num_seen - point.seen_at) * RECENT_PLAIN // len(point.seconds)

    def most_known(self, rows: int) -> int:
        """Drafts of the largest step that is known, of about so many rows."""
        points = self._points.get(size_class(rows), {}).values()
        return max((math.ceil(point.drafts) for point in points if point.known), default=0)

    def seconds(self, rows: int, most: int) -> list[float]:
        """Of steps with 0 to `most` drafts; what they take without is known."""
        plain = self.plain(rows)
        assert plain is not None
        points = self._points[size_class(rows)]
        for size in [s for s, p in points.items() if p.drafts and self._is_old(p)]:
            del points[size]
        known = sorted((p.drafts, p.took) for p in points.values() if p.known)
        found, slope = [plain], FIRST_SLOPE * plain / rows
        at = took = 0.0
        for drafts, seconds in known:
            if drafts > at:
                at_next, took_next = drafts, max(took, seconds)
                slope = (took_next - took) / (at_next - at)
                end = min(most, int(at_next))
                found += [took + slope * (number - at) for number in range(len(found), end + 1)]
                at, took = at_next, took_next
            else:
                took = seconds
        found += [took + slope * (number - at) for number in range(len(found), most + 1)]
        return found

    def _is_old(self, point: _Point) -> bool:
        return self._num_seen - point.seen_at > FORGOTTEN
