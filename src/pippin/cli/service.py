"""`pippin serve` as a service of the user's: systemd on Linux, launchd on macOS.

A definition is what is run; a manager writes it into a file of its own kind, and calls the system's
commands to start, show and stop it. It has no keys: other users may read the file.
"""

from __future__ import annotations

import getpass
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from platformdirs import user_config_path, user_log_path

from pippin.cli.options import OPTION, PREFIX, SECRETS, SETTINGS, Flag, parse_serve
from pippin.config import Config
from pippin.errors import ConfigError, PippinError
from pippin.hub import HUB_ID
from pippin.startup.checkpoint import find_checkpoint

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# Variables with paths; a service does not inherit the environment of the terminal.
CARRIED = (
    *("HF_HOME", "HF_HUB_CACHE", "PIPPIN_BLAS"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME"),
)
RESTART_S = 10  # between a failure and the next start
STOP_MARGIN_S = 15  # beyond what requests get to finish


class ServiceError(PippinError):
    """A service cannot be installed, shown or removed here."""


@dataclass(frozen=True)
class Definition:
    name: str
    command: tuple[str, ...]
    directory: Path  # where relative paths in options, and pippin.toml, are looked for
    stop_s: int
    environment: dict[str, str] = field(default_factory=dict)


def define(name: str, options: Sequence[str], *, drain_timeout: int) -> Definition:
    """`pippin serve OPTIONS`, run as in this directory by this interpreter."""
    if not NAME.fullmatch(name):
        raise ServiceError(
            f"--name {name!r} is not a service name: use letters, digits, dots, dashes and "
            "underscores, and start with a letter or digit"
        )
    return Definition(
        name=name,
        command=(sys.executable, "-P", "-m", "pippin", "serve", *options),  # -P: not a ./pippin
        directory=Path.cwd(),
        stop_s=drain_timeout + STOP_MARGIN_S,
        environment={key: os.environ[key] for key in CARRIED if key in os.environ},
    )


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

    def status(self) -> tuple[bool, str]:
        """Whether it runs, and what the manager says of it."""
        shown = run_command("launchctl", "print", self._target)
        if shown.returncode != 0:
            return False, "not loaded"
        # "state = running", "pid = 123", "last exit code = 1": one tab deep, each on its line
        facts = dict(re.findall(r"^\t([\w ]+) = (.*)$", shown.stdout, re.MULTILINE))
        state = facts.get("state", "unknown")
        description = state + (f", process {facts['pid']}" if "pid" in facts else "")
        if state != "running" and "last exit code" in facts:
            description += f", last exit status {facts['last exit code']}"
        return state == "running", description

    def uninstall(self) -> None:
        if self._is_loaded():
            must_run("launchctl", "bootout", self._target)
        self.file.unlink()

    def start_hint(self) -> str:
        return "It starts when you log in."

    def _is_loaded(self) -> bool:
        return run_command("launchctl", "print", self._target).returncode == 0


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

    def status(self) -> tuple[bool, str]:
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
        return facts.get("ActiveState") == "active", description

    def uninstall(self) -> None:
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


def installed(name: str) -> Manager:
    manager = manager_of(name)
    if not manager.file.exists():
        raise ServiceError(
            f"no service is installed ({manager.file} does not exist): run `pippin service install`"
        )
    return manager


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


service = App(name="service")
Name = Annotated[str, Parameter(help="Name of the service, to install several of them.")]


@service.command
def install(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    name: Name = "pippin",
    print_only: Annotated[Flag, Parameter(name="--print")] = False,
) -> None:
    """Start a server now and at every login, and restart it when it fails.

    The service runs in this directory: `pippin service install -- Qwen/Qwen3.5-0.8B --port 9000`.
    An installed service of the same name is replaced.

    Parameters
    ----------
    options
        Options of `pippin serve`, after `--`. Options that are not given are read from pippin.toml.
    print_only
        Print the service file without writing it or starting anything.
    """
    config = _parse(options)
    definition = define(name, options, drain_timeout=config.server.drain_timeout)
    manager = manager_of(name)
    if print_only:
        print(manager.text(definition), end="")
        return
    manager.install(definition)
    print(f"Installed {manager.file}")
    print(
        f"It serves at http://{config.server.host}:{config.server.port} when its model is loaded."
    )
    if SETTINGS.file is not None:
        print(f"It reads {SETTINGS.file.resolve()}")
    print(manager.start_hint())
    if "HF_TOKEN" in os.environ:
        print("The service does not inherit HF_TOKEN: run `hf auth login` to store a token for it.")
    print(f"Logs: {manager.logs}")


@service.command
def status(*, name: Name = "pippin") -> None:
    """Print the state of the service and where its logs are. Exit status 3 if it is not running."""
    manager = installed(name)
    is_running, description = manager.status()
    print(f"{name} is {description}")
    print(f"File: {manager.file}")
    print(f"Logs: {manager.logs}")
    if not is_running:
        raise SystemExit(3)


@service.command
def uninstall(*, name: Name = "pippin") -> None:
    """Stop the service and delete its file. Models, caches and pippin.toml are kept."""
    manager = installed(name)
    manager.uninstall()
    print(f"Removed {manager.file}")


def _parse(options: tuple[str, ...]) -> Config:
    """The config of the service, or the error that `pippin serve` would report."""
    config = parse_serve(options, SETTINGS)
    for option, origin in SETTINGS.origins.items():
        if option in SECRETS and origin == OPTION:
            raise ConfigError(
                f"--{option} would be readable in the service file and in the process list: use "
                f"--{option}-file, or write it into a pippin.toml with mode 600"
            )
        if origin.startswith(PREFIX):
            instead = f"--{option}-file" if option in SECRETS else f"--{option}"
            raise ConfigError(f"a service does not inherit {origin}: use {instead} or pippin.toml")
    if "PIPPIN_CONFIG" in os.environ:
        raise ConfigError("a service does not inherit PIPPIN_CONFIG: use --config")
    model = config.model.model
    if Path(model).expanduser().exists() or not HUB_ID.fullmatch(model):
        find_checkpoint(config.model)  # it needs no download, and may be missing
    return config
