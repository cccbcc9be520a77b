"""`pippin service install | status | uninstall`: a server that starts by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pippin.cli.config_file import SECRETS
from pippin.cli.model_commands import serve
from pippin.cli.options import SECTIONS
from pippin.cli.settings import OPTION, PREFIX, SETTINGS
from pippin.config import Config
from pippin.errors import ConfigError
from pippin.service.definition import define
from pippin.service.manager import Manager, manager_of
from pippin.startup.checkpoint import HUB_ID, find_checkpoint

service = App(
    name="service",
    help="Have `pippin serve` started by the system: systemd on Linux, launchd on macOS.",
)
serve_options = App(name="pippin serve", config=SETTINGS)
serve_options.default(serve)

Name = Annotated[str, Parameter(help="The service's name, if there are to be several.")]


@service.command
def install(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    name: Name = "pippin",
    print_only: Annotated[bool, Parameter(name="--print", negative="")] = False,
) -> None:
    """Start a server now, and whenever you log in; restart it when it fails.

    It is run as in this directory: `pippin service install -- Qwen/Qwen3.5-0.8B --port 9000`. One
    that was installed before is replaced.

    Parameters
    ----------
    options
        What `pippin serve` is given, after `--`. What is not is read from pippin.toml.
    print_only
        Show the file that would be written, and do nothing.
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
        f"It serves at http://{config.server.host}:{config.server.port} once its model is loaded."
    )
    if SETTINGS.file is not None:
        print(f"It reads {SETTINGS.file.resolve()}")
    print(manager.start_hint())
    if "HF_TOKEN" in os.environ:
        print("It does not see HF_TOKEN: `hf auth login` keeps a token where it finds it.")
    _print_logs(manager)


@service.command
def status(*, name: Name = "pippin") -> None:
    """Show whether the service runs, and where its logs are. Exit status 3 if it does not run."""
    manager = manager_of(name)
    found = manager.status()
    print(f"{name} is {found.says}")
    print(f"File: {manager.file}")
    _print_logs(manager)
    if not found.is_running:
        raise SystemExit(3)


@service.command
def uninstall(*, name: Name = "pippin") -> None:
    """Stop the service and remove its file. Models, caches and pippin.toml stay."""
    manager = manager_of(name)
    manager.uninstall()
    print(f"Removed {manager.file}")


def _print_logs(manager: Manager) -> None:
    print(f"Logs: {manager.logs}")


def _parse(options: tuple[str, ...]) -> Config:
    """The config that the service will have, or an error if `pippin serve` would have one."""
    _, bound, _ = serve_options.parse_args(list(options))
    config = Config(**{k: v for k, v in bound.arguments.items() if k in SECTIONS})
    for option, origin in SETTINGS.origins.items():
        if option in SECRETS and origin == OPTION:
            raise ConfigError(
                f"--{option} would stand in a file and in the list of processes: give "
                f"--{option}-file, or write it into a pippin.toml that only you can read"
            )
        if origin.startswith(PREFIX):
            instead = f"--{option}-file" if option in SECRETS else f"--{option}"
            raise ConfigError(
                f"a service does not see {origin}: give {instead}, or use pippin.toml"
            )
    if "PIPPIN_CONFIG" in os.environ:
        raise ConfigError("a service does not see PIPPIN_CONFIG: give --config")
    model = config.model.model
    if Path(model).expanduser().exists() or not HUB_ID.fullmatch(model):
        find_checkpoint(config.model)  # nothing is downloaded for that, and it may be missing
    return config
