"""CPU time that a hypervisor gave to others: on a shared machine the first thing to look at."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
STOLEN = 7  # its place among user, nice, system, idle, iowait, irq, softirq, steal
COUNTED = 8  # what follows is part of user and nice


class Ticks(NamedTuple):
    """Of all CPUs since the machine started."""

    stolen: int
    all: int

    def stolen_since(self, before: Ticks) -> float:
        """As a share of all CPU time."""
        return (self.stolen - before.stolen) / max(1, self.all - before.all)


def read_ticks(stat: Path = STAT) -> Ticks | None:
    """None where the system has no such counters: elsewhere than on Linux."""
    if not stat.exists():
        return None
    fields = [int(field) for field in stat.read_text().splitlines()[0].split()[1:]]
    return Ticks(fields[STOLEN], sum(fields[:COUNTED]))
