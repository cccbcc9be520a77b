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
    says: str  # what the manager calls it


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
