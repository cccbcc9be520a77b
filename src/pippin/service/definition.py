"""What a service runs, for any service manager. Has no keys: other users may read its file."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pippin.errors import PippinError

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


def not_installed(file: Path) -> ServiceError:
    return ServiceError(
        f"no service is installed ({file} does not exist): run `pippin service install`"
    )


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
