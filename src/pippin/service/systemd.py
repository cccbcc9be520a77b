"""A unit of the user's own systemd. Needs no root; logs go to the journal."""

from __future__ import annotations

import getpass

from platformdirs import user_config_path

from pippin.service.definition import RESTART_S, Definition, not_installed
from pippin.service.system import Status, must_run, run_command, write_privately

UNIT = """\
# Written by `pippin service install`; `pippin service uninstall` removes it.
[Unit]
Description=Pippin, a server of language models
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
Type=exec
WorkingDirectory={directory}
ExecStart={command}
{environment}Restart=on-failure
RestartSec={restart_s}
# Exit status 2: wrong options, which a restart does not fix.
RestartPreventExitStatus=2
# The server stops its engine itself after requests have finished.
KillMode=mixed
TimeoutStopSec={stop_s}

[Install]
WantedBy=default.target
"""


class Systemd:
    def __init__(self, name: str) -> None:
        self.unit = f"{name}.service"
        self.file = user_config_path("systemd") / "user" / self.unit
        self.logs = f"journalctl --user -u {name} -f"

    def text(self, definition: Definition) -> str:
        environment = {"PYTHONUNBUFFERED": "1", **definition.environment}
        return UNIT.format(
            directory=str(definition.directory).replace("%", "%%"),
            command=" ".join(map(quote, definition.command)),
            environment="".join(
                f"Environment={quote(f'{name}={value}')}\n" for name, value in environment.items()
            ),
            restart_s=RESTART_S,
            stop_s=definition.stop_s,
        )

    def install(self, definition: Definition) -> None:
        must_run("systemctl", "--user", "show-environment")  # before anything is written
        write_privately(self.file, self.text(definition))
        must_run("systemctl", "--user", "daemon-reload")
        must_run("systemctl", "--user", "enable", self.unit)
        must_run("systemctl", "--user", "restart", self.unit)

    def status(self) -> Status:
        if not self.file.exists():
            raise not_installed(self.file)
        shown = must_run(
            *("systemctl", "--user", "show", self.unit),
            "--property=ActiveState,SubState,MainPID,NRestarts",
        )
        facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        description = f"{facts.get('ActiveState', 'unknown')} ({facts.get('SubState', 'unknown')})"
        if facts.get("MainPID", "0") != "0":
            description += f", process {facts['MainPID']}"
        if facts.get("NRestarts", "0") != "0":
            description += f", restarted {facts['NRestarts']} times"
        return Status(facts.get("ActiveState") == "active", description)

    def uninstall(self) -> None:
        if not self.file.exists():
            raise not_installed(self.file)
        must_run("systemctl", "--user", "disable", "--now", self.unit)
        self.file.unlink()
        must_run("systemctl", "--user", "daemon-reload")

    def start_hint(self) -> str:
        user = getpass.getuser()
        lingering = run_command("loginctl", "show-user", user, "--property=Linger")
        if lingering.stdout.strip() == "Linger=yes":
            return "It starts when the machine boots."
        return (
            "It starts when you log in and stops when you log out. To start it at boot: "
            f"loginctl enable-linger {user}"
        )


def quote(word: str) -> str:
    """As systemd reads words: $ and % have meanings of their own."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    escaped = escaped.replace("\n", "\\n")
    return escaped if escaped and not any(c in escaped for c in " \t'\";\\") else f'"{escaped}"'
