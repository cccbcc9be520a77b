"""Which service manager this system has. Knows no service."""

from __future__ import annotations

import sys

from pippin.service.definition import ServiceError
from pippin.service.launchd import Launchd
from pippin.service.systemd import Systemd

PLATFORM: str = sys.platform  # a name of ours: type checkers take sys.platform for theirs


Manager = Launchd | Systemd  # of one service, by its name


def manager_of(name: str) -> Manager:
    if PLATFORM == "darwin":
        return Launchd(name)
    if PLATFORM == "linux":
        return Systemd(name)
    raise ServiceError(
        f"services are not supported on {PLATFORM}, only on Linux (systemd) and macOS (launchd): "
        "run `pippin serve` with another process manager"
    )
