"""`pippin service install | status | uninstall`: a server that starts by itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pippin.cli.model_commands import serve
from pippin.cli.options import SECTIONS
from pippin.cli.settings import OPTION, PREFIX, SECRETS, SETTINGS
from pippin.config import Config
from pippin.errors import ConfigError
from pippin.hub import HUB_ID
from pippin.service import define, installed, manager_of
from pippin.startup.checkpoint import find_checkpoint

service = App(
    name="service",
    help="Run `pippin serve` as a service of the system: systemd on Linux, launchd on macOS.",
)
serve_options = App(name="pippin serve", config=SETTINGS)
serve_options.default(serve)

Name = Annotated[str, Parameter(help="Name of the service, to install several of them.")]


@service.command
def install(
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
    name: Name = "pippin",
    print_only: Annotated[bool, Parameter(name="--print", negative="")] = False,
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
    found = manager.status()
    print(f"{name} is {found.description}")
    print(f"File: {manager.file}")
    print(f"Logs: {manager.logs}")
    if not found.is_running:
        raise SystemExit(3)


@service.command
def uninstall(*, name: Name = "pippin") -> None:
    """Stop the service and delete its file. Models, caches and pippin.toml are kept."""
    manager = installed(name)
    manager.uninstall()
    print(f"Removed {manager.file}")


def _parse(options: tuple[str, ...]) -> Config:
    """The config of the service, or the error that `pippin serve` would report."""
    _, bound, _ = serve_options.parse_args(list(options))
    config = Config(**{k: v for k, v in bound.arguments.items() if k in SECTIONS})
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
