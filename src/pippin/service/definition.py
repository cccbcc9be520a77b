"""What a service runs, whoever runs it. Holds no key: others may read what it becomes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pippin.errors import PippinError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# What tells a server where things are; a service starts without the environment of a terminal.
CARRIED = (
    *("HF_HOME", "HF_HUB_CACHE", "PIPPIN_BLAS", "PIPPIN_OPERATIONS"),
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
        raise ServiceError(f"a service's name has letters, digits, dots and dashes, not {name!r}")
    return Definition(
        name=name,
        command=(sys.executable, "-P", "-m", "pippin", "serve", *options),  # -P: not a ./pippin
        directory=Path.cwd(),
        stop_s=drain_timeout + STOP_MARGIN_S,
        environment={key: os.environ[key] for key in CARRIED if key in os.environ},
    )
