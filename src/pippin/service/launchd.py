"""An agent of the user's launchd. Needs no root; logs go to a file in ~/Library/Logs."""

from __future__ import annotations

import os
import plistlib
import re
import shlex
from pathlib import Path

from platformdirs import user_log_path

from pippin.service.definition import RESTART_S, Definition, not_installed
from pippin.service.system import Status, must_run, run_command, write_privately


class Launchd:
    def __init__(self, name: str) -> None:
        self.label = f"{name}.agent"
        self.file = Path("~/Library/LaunchAgents").expanduser() / f"{self.label}.plist"
        self.log_file = user_log_path("pippin") / f"{name}.log"
        self.logs = f"tail -F {shlex.quote(str(self.log_file))}"
        self._domain = f"gui/{os.getuid()}"
        self._target = f"{self._domain}/{self.label}"

    def text(self, definition: Definition) -> str:
        agent = {
            "Label": self.label,
            "ProgramArguments": list(definition.command),
            "WorkingDirectory": str(definition.directory),
            "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", **definition.environment},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": RESTART_S,
            "ExitTimeOut": definition.stop_s,
            "ProcessType": "Interactive",  # others are slowed down in favour of apps
            "StandardOutPath": str(self.log_file),
            "StandardErrorPath": str(self.log_file),
        }
        return plistlib.dumps(agent, sort_keys=False).decode()

    def install(self, definition: Definition) -> None:
        must_run("launchctl", "print", self._domain)  # before anything is written
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.log_file.touch(mode=0o600)
        write_privately(self.file, self.text(definition))
        if self._is_loaded():
            must_run("launchctl", "bootout", self._target)
        must_run("launchctl", "enable", self._target)
        must_run("launchctl", "bootstrap", self._domain, str(self.file))

    def status(self) -> Status:
        if not self.file.exists():
            raise not_installed(self.file)
        shown = run_command("launchctl", "print", self._target)
        if shown.returncode != 0:
            return Status(False, "not loaded")
        # "state = running", "pid = 123", "last exit code = 1": one tab deep, each on its line
        facts = dict(re.findall(r"^\t([\w ]+) = (.*)$", shown.stdout, re.MULTILINE))
        state = facts.get("state", "unknown")
        description = state + (f", process {facts['pid']}" if "pid" in facts else "")
        if state != "running" and "last exit code" in facts:
            description += f", last exit status {facts['last exit code']}"
        return Status(state == "running", description)

    def uninstall(self) -> None:
        if not self.file.exists():
            raise not_installed(self.file)
        if self._is_loaded():
            must_run("launchctl", "bootout", self._target)
        self.file.unlink()

    def start_hint(self) -> str:
        return "It starts when you log in."

    def _is_loaded(self) -> bool:
        return run_command("launchctl", "print", self._target).returncode == 0
