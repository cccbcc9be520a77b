"""How long a load takes, learnt from those that were made. Reads no clock."""

from __future__ import annotations

from dataclasses import dataclass

FORGETTING = 0.25  # how much the last one counts
MIN_BYTES = 1 << 20  # fewer tell nothing of a rate
HOPE = 1.02  # with each load that was declined a tier is taken for a little faster than it was


@dataclass
class LoadRates:
    """A load takes a latency, and a time for its bytes."""

    bytes_per_second: float
    latency: float
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
        """So many bytes have not come in that time: it takes longer than that."""
        if nbytes < MIN_BYTES:
            self.observe_rest(seconds)
        else:
            self.observe_read(nbytes, seconds)

    def observe_rest(self, seconds: float) -> None:
        """From asking for a whole load to having it, less its reads."""
        self.latency += FORGETTING * (seconds - self.latency)

    def decline(self) -> None:
        """It seemed too slow. One that was busy for a while is tried again some time."""
        self.bytes_per_second *= HOPE
        self.latency /= HOPE
