"""The system's commands and files, as managers use them. Knows no manager."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pippin.service.definition import ServiceError


@dataclass(frozen=True)
class Status:
    is_running: bool
    description: str  # in the words of the manager


def write_privately(file: Path, text: str) -> None:
    """Readable by its owner alone: it has paths and options."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.chmod(0o600)
    file.write_text(text, encoding="utf-8")


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    """The result of a command of the system, also when it fails."""
    if shutil.which(command[0]) is None:
        raise ServiceError(
            f"the command {command[0]} was not found: `pippin service install --print` prints the "
            "service file, to install it yourself"
        )
    return subprocess.run(command, capture_output=True, text=True, check=False)


def must_run(*command: str) -> str:
    """The output of a command that must succeed."""
    done = run_command(*command)
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise ServiceError(f"`{' '.join(command)}` failed: {reason}")
    return done.stdout
