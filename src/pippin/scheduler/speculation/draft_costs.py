"""What steps with drafts take, from what such steps took. Assumes no formula; reads no clock.

For about so many rows and each depth of the deepest row, the last steps seen are remembered:
devices run all rows as deep as that, or nearly. Between two depths costs are on a line, and behind
the last one they go on as before it: too cheap, where a device has a limit there. Then a step shows
it. Where none was seen with so many rows, a depth is believed to take the share more that it took
with the nearest number of rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from pippin.scheduler.pacing.costs import size_class

LEAST_SEEN = 2  # steps with drafts before they count,
LEAST_PLAIN = 3  # and of those without, which all others are compared with
RECENT = 5  # steps with drafts that are remembered of a depth,
RECENT_PLAIN = 16  # and without
FORGOTTEN = 1024  # steps after which a depth that was not seen again is forgotten
FIRST_SLOPE = 0.05  # of a step, for a draft in each row: before any was seen


@dataclass
class _Point:
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    least: int = LEAST_SEEN
    seen_at: int = 0
    took: float = 0.0  # the lower quartile: what disturbs a step only makes it longer

    def add(self, seconds: float, seen_at: int) -> None:
        self.seen_at = seen_at
        self.seconds.append(seconds)
        self.took = sorted(self.seconds)[len(self.seconds) // 4]

    @property
    def known(self) -> bool:
        return len(self.seconds) >= self.least


class DraftCosts:
    def __init__(self) -> None:
        self._points: dict[int, dict[int, _Point]] = {}  # by about so many rows, and depth
        self._num_seen = 0

    def observe(self, rows: float, depth: int, seconds: float) -> None:
        """A step, or the mean of a few."""
        self._num_seen += 1
        points = self._points.setdefault(size_class(round(rows)), {})
        if depth not in points:
            plain = deque[float](maxlen=RECENT_PLAIN)
            points[depth] = _Point() if depth else _Point(plain, LEAST_PLAIN)
        points[depth].add(seconds, self._num_seen)

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
        point = self._points.get(size_class(round(rows)), {}).get(0)
        return point if point is not None and point.known else None

    def num_since_plain(self, rows: int) -> int:
        """Steps since one without drafts was seen, of about so many rows; more if few were."""
        point = self._points[size_class(rows)][0]
        return (self._num_seen - point.seen_at) * RECENT_PLAIN // len(point.seconds)

    def deepest_known(self, rows: int) -> int:
        """Of about so many rows."""
        return max(self._shares(size_class(rows)), default=0)

    def seconds(self, rows: int, most: int) -> list[float]:
        """Of steps as deep as 0 to `most`; what they take without drafts is known."""
        plain = self.plain(rows)
        assert plain is not None
        known = self._nearest_shares(size_class(rows))
        found, slope = [1.0], FIRST_SLOPE
        for depth in range(1, most + 1):
            next_known = min((other for other in known if other >= depth), default=None)
            if next_known is not None:
                at = depth - 1
                slope = max(0.0, known[next_known] - found[at]) / (next_known - at)
            found.append(found[-1] + slope)
        return [plain * share for share in found]

    def _nearest_shares(self, of_rows: int) -> dict[int, float]:
        for other in sorted(self._points, key=lambda other: (abs(other - of_rows), other)):
            if shares := self._shares(other):
                return shares
        return {}

    def _shares(self, of_rows: int) -> dict[int, float]:
        """Of a step without drafts, by depth: what is known."""
        points = self._points.get(of_rows, {})
        for depth in [d for d, p in points.items() if d and self._is_old(p)]:
            del points[depth]
        if 0 not in points or not points[0].known:
            return {}
        return {d: p.took / points[0].took for d, p in points.items() if d and p.known}

    def _is_old(self, point: _Point) -> bool:
        return self._num_seen - point.seen_at > FORGOTTEN
