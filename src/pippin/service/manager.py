"""What a system's own manager of services does for ours, and which one this system has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pippin.service.definition import Definition, ServiceError

PLATFORM: str = sys.platform  # a name of ours: type checkers take sys.platform for theirs


@dataclass(frozen=True)
class Status:
    is_running: bool
    says: str  # what the manager calls it


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
        from pippin.service.launchd import Launchd

        return Launchd(name)
    if PLATFORM == "linux":
        from pippin.service.systemd import Systemd

        return Systemd(name)
    raise ServiceError(f"no services on {PLATFORM}: systemd on Linux and launchd on macOS run them")


def write_privately(file: Path, text: str) -> None:
    """For its owner's eyes: it names paths and options."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(text, encoding="utf-8")


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    """What a command of the system says. Its failure is an answer too."""
    if shutil.which(command[0]) is None:
        raise ServiceError(f"there is no {command[0]} here: `--print` shows what it would be given")
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tell(*command: str) -> str:
    """Have a command do something; its failure is ours."""
    done = ask(*command)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise ServiceError(f"{' '.join(command)}: {reason}")
    return done.stdout
