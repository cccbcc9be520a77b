"""What tells one tier below memory from another: its name, its rates, how long it lasts."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.cache.tiers.rates import LoadRates
from pippin.types import TierName


@dataclass(frozen=True)
class TierKind:
    name: TierName
    first_bytes_per_second: float  # of loads, until one was measured
    first_latency: float  # seconds
    max_bytes_written: float  # a second
    outlives: bool  # the process: worth writing to when an engine is about to stop

    def rates(self) -> LoadRates:
        return LoadRates(self.first_bytes_per_second, self.first_latency)


# Until it was measured: as fast as files that the system holds in memory. A slow disk is found out
# by a load that is late, once; a fast one that was taken for slow would never be tried. Written
# slowly, because others want to read and write there too.
DISK = TierKind("disk", 8e9, 0.01, 256e6, outlives=True)
# Verified by a few threads, and sent over a bus that is faster than they are.
HOST = TierKind("host", 8e9, 0.004, 2e9, outlives=False)
