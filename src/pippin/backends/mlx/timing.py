"""Times work on this device and remembers what it took, in small files of the user's.

    {"<device and versions>": {"<what was timed>": {"kernel": 0.19, "joined": 0.12}}}

Knows nothing that it times. Times are kept, not verdicts. Losing a file costs a second at the next
load: whatever is wrong with it is said in the log and never an error.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import ModuleType

import msgspec
from platformdirs import user_cache_path

from pippin.backends.mlx.device import device_info

REPEATS = 5

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], None]], float]  # seconds that some work takes
Times = dict[str, float]


def shortest_seconds(run: Callable[[], None]) -> float:
    """The shortest of a few runs after a first: kernels are built, and others use the machine."""
    run()
    shortest = float("inf")
    for _ in range(REPEATS):
        began = perf_counter()
        run()
        shortest = min(shortest, perf_counter() - began)
    return shortest


def machine(modules: Iterable[ModuleType]) -> str:
    """All that times depend on but for what was timed: device, versions, and our own `modules`."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("mlx", "mlx-lm"))
    ours = hashlib.sha256()
    for module in modules:
        ours.update(Path(str(module.__file__)).read_bytes())
    return ", ".join([device_info().name, *versions, f"ours {ours.hexdigest()[:8]}"])


def times_file(subject: str) -> Path:
    return user_cache_path("pippin") / f"{subject}.json"


class RememberedTimes:
    """The times of one machine. The file is read when first asked, and written if any are new."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self._machine = machine
        self._new: dict[str, Times] = {}

    @cached_property
    def _table(self) -> dict[str, dict[str, Times]]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, dict[str, Times]])
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s: %s; %s timed again", self._path, error, self._path.stem)
            return {}

    def get(self, key: str) -> Times | None:
        return self._table.get(self._machine, {}).get(key)

    def add(self, key: str, times: Times) -> None:
        self._new[key] = times

    def save(self) -> None:
        """Replace the file whole: no reader ever sees half of it."""
        if not self._new:
            return
        machines = self._table | {self._machine: self._table.get(self._machine, {}) | self._new}
        text = msgspec.json.format(msgspec.json.encode(machines), indent=2)
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new.write_bytes(text)
            new.replace(self._path)
        except OSError as error:
            logger.warning("%s timed again at the next load: %s", self._path.stem, error)
            with suppress(OSError):  # of a full disk
                new.unlink(missing_ok=True)
