"""Remembers the times of recurrences in a small file of the user's; knows nothing that it times.

    {"<device and versions>": {"<kind of call>": {"ours_ms": 1.9, "mlx_lm_ms": 1.2}}}

Times are kept, not verdicts. Losing the file costs a second at the next load: whatever is wrong
with it is said in the log and never an error.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import msgspec

from pippin.user_cache import user_cache

logger = logging.getLogger(__name__)


class Times(msgspec.Struct, frozen=True):
    """Milliseconds of one call, added up over the sizes that were timed."""

    ours_ms: float
    mlx_lm_ms: float


Table = dict[str, dict[str, Times]]


def default_path() -> Path:
    return user_cache() / "recurrences.json"


class RememberedTimes:
    """The times of one machine. The file is read when first asked, and written if any are new."""

    def __init__(self, path: Path, machine: str) -> None:
        self._path = path
        self._machine = machine
        self._new: dict[str, Times] = {}

    @cached_property
    def _table(self) -> Table:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=Table)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.warning("%s: %s; recurrences are timed again", self._path, error)
            return {}

    def get(self, kind: str) -> Times | None:
        return self._table.get(self._machine, {}).get(kind)

    def add(self, kind: str, times: Times) -> None:
        self._new[kind] = times

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
            logger.warning("recurrences will be timed again at the next load: %s", error)
            with suppress(OSError):  # of a full disk
                new.unlink(missing_ok=True)
