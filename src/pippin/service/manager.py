"""The protocol of a service manager, and which one this system has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

from pippin.service.definition import Definition, ServiceError
from pippin.service.launchd import Launchd
from pippin.service.system import Status
from pippin.service.systemd import Systemd

PLATFORM: str = sys.platform  # a name of ours: type checkers take sys.platform for theirs


class Manager(Protocol):
    """Of one service, by its name."""

    file: Path
    logs: str  # a command that shows them

    def text(self, definition: Definition) -> str:
        """The content of the service file."""
        ...

    def install(self, definition: Definition) -> None:
        """Write the file and start the service now and at login; replaces a running one."""
        ...

    def status(self) -> Status: ...

    def uninstall(self) -> None:
        """Stop it and remove the file."""
        ...

    def start_hint(self) -> str:
        """When it will start automatically."""
        ...


def manager_of(name: str) -> Manager:
    if PLATFORM == "darwin":
        return Launchd(name)
    if PLATFORM == "linux":
        return Systemd(name)
    raise ServiceError(
        f"services are not supported on {PLATFORM}, only on Linux (systemd) and macOS (launchd): "
        "run `pippin serve` with another process manager"
    )
