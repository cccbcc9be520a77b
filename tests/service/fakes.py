"""`systemctl`, `loginctl` and `launchctl` that note what they were told, first on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class FakeCommands:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._log = folder / "log"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def add(self, name: str, script: str = "") -> None:
        """A command that runs `script`, a shell's, after noting its arguments."""
        path = self._folder / name
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> "{self._log}"\n{script}\n')
        path.chmod(0o755)

    def told(self) -> list[str]:
        """What they were told since the last time, in order."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        self._log.unlink(missing_ok=True)
        return lines
