"""What tells one tier below memory from another: its name, its rates and how long it lasts.

Reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.types import TierName

FORGETTING = 0.25  # the weight of the last load
MIN_BYTES = 1 << 20  # fewer say nothing about a rate
HOPE = 1.02  # for each load that was declined, a tier is taken for a little faster


@dataclass
class LoadRates:
    """How long a load takes, learnt from earlier ones: a latency, and a time for its bytes."""

    bytes_per_second: float
    latency: float  # seconds
    num_seen: int = 0

    def seconds(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bytes_per_second

    def observe_read(self, nbytes: int, seconds: float) -> None:
        """The store's own part: what was read and verified, and for how long."""
        if nbytes < MIN_BYTES:
            return
        rate = nbytes / max(seconds, 1e-6)
        weight = FORGETTING if self.num_seen else 1.0
        self.bytes_per_second += weight * (rate - self.bytes_per_second)
        self.num_seen += 1

    def observe_late(self, nbytes: int, seconds: float) -> None:
        """These bytes did not arrive in that time: they take longer."""
        if nbytes < MIN_BYTES:
            self.observe_rest(seconds)
        else:
            self.observe_read(nbytes, seconds)

    def observe_rest(self, seconds: float) -> None:
        """From the start of a whole load to its end, less its reads."""
        self.latency += FORGETTING * (seconds - self.latency)

    def decline(self) -> None:
        """It seemed too slow. A tier that was busy for a while is tried again some time."""
        self.bytes_per_second *= HOPE
        self.latency /= HOPE


@dataclass(frozen=True)
class TierKind:
    name: TierName
    first_bytes_per_second: float  # of loads, until one was measured
    first_latency: float  # seconds
    max_bytes_written: float  # a second; 0: this engine writes nothing to it
    outlives: bool  # the process: worth writing to when an engine is about to stop

    def rates(self) -> LoadRates:
        return LoadRates(self.first_bytes_per_second, self.first_latency)


# Until it was measured: as fast as files in the page cache. A slow disk is noticed by one late
# load; a fast one that was taken for slow would never be tried. Written slowly: others use it too.
DISK = TierKind("disk", 8e9, 0.01, 256e6, outlives=True)
# Verified by a few threads, and sent over a bus that is faster than they are.
HOST = TierKind("host", 8e9, 0.004, 2e9, outlives=False)
# What prefill engines sent lies in the host's memory; and what this one sends to others.
PEER = TierKind("peer", 8e9, 0.004, 0.0, outlives=False)
OUTGOING = TierKind("peer", 8e9, 0.004, float("inf"), outlives=False)
