"""Records in files, each whole after a crash, as it was or as it is to be. Knows no field."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

log = logging.getLogger(__name__)

T = TypeVar("T")


def new_id(prefix: str) -> str:
    """Ids sort in order of creation."""
    return f"{prefix}{time.time_ns():016x}{uuid.uuid4().hex[:16]}"


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file; after this call neither a crash nor a power failure loses it."""
    new = path.with_name(f"{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """What was created, renamed or removed in it."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_records(paths: Iterable[Path], kind: type[T]) -> list[T]:
    """Those that can be read: of a damaged one the log has the name."""
    found = []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
        except msgspec.DecodeError as error:
            log.warning("%s is damaged and not used: %s", path, error)
    return found
