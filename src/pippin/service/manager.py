"""What a system's own manager of services does for ours, and which one this system has."""

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
        """What the file will say."""
        ...

    def install(self, definition: Definition) -> None:
        """Write the file and start the service, now and from now on; one that runs makes room."""
        ...

    def status(self) -> Status: ...

    def uninstall(self) -> None:
        """Stop it and remove the file."""
        ...

    def start_hint(self) -> str:
        """When it will start by itself."""
        ...


def manager_of(name: str) -> Manager:
    if PLATFORM == "darwin":
        return Launchd(name)
    if PLATFORM == "linux":
        return Systemd(name)
    raise ServiceError(f"no services on {PLATFORM}: systemd on Linux and launchd on macOS run them")
