"""Inspects a cache directory from outside: what is in it, whether all of it verifies; empties it.

Inspecting needs no lock and changes nothing, so a server may run meanwhile. Knows a model only by
the name of its folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pippin.cache.disk.directory import (
    RECENCY,
    DirectoryLock,
    model_folder,
    model_folders,
    remove_segment,
    segment_bytes,
    segment_paths,
)
from pippin.cache.disk.files import Files, open_regular
from pippin.cache.disk.segments.catalog import Catalog
from pippin.cache.disk.segments.format import HEADER, decode_header
from pippin.cache.disk.segments.segment_log import SegmentLog
from pippin.cache.entries.entry import Key
from pippin.errors import DiskCacheError


@dataclass
class ModelReport:
    """What is there of one model."""

    name: str  # of its folder
    segments: int
    nbytes: int
    written: float  # when its files were last changed, as time.time() says it
    entries: Counter[str] = field(default_factory=Counter)  # by component
    payload_bytes: Counter[str] = field(default_factory=Counter)  # by component
    damaged: int = 0
    foreign: int = 0
    unreadable: int = 0  # files or entries that the system did not let us read


def look(directory: Path, *, verify: bool = False) -> Iterator[ModelReport]:
    """Of each model in a directory; with `verify`, after every payload has been read."""
    if not directory.is_dir():
        raise DiskCacheError(f"{directory} is not a directory")
    for folder in model_folders(directory):
        paths = list(segment_paths(folder))
        if paths:
            nbytes = sum(map(segment_bytes, paths))
            report = ModelReport(folder.name, len(paths), nbytes, _last_change(paths))
            _add_entries(report, directory, _model_of(paths), verify=verify)
            yield report


def empty(directory: Path) -> int:
    """Remove every model's segments; returns the bytes. Raises DiskCacheError if it is in use."""
    if not directory.is_dir():
        raise DiskCacheError(f"{directory} is not a directory")
    try:
        lock = DirectoryLock(directory)
    except OSError as error:
        raise DiskCacheError(f"{directory} cannot be changed: {error}") from error
    files, freed = Files(), 0
    try:
        for folder in model_folders(directory):
            for path in segment_paths(folder):
                freed += segment_bytes(path)
                remove_segment(files, path)
            files.remove(folder / RECENCY)
            if not any(folder.iterdir()):
                folder.rmdir()
    except OSError as error:
        raise DiskCacheError(f"{directory} cannot be emptied: {error}") from error
    finally:
        lock.release()
    return freed


def _add_entries(
    report: ModelReport, directory: Path, model: bytes | None, *, verify: bool
) -> None:
    if model is None or model_folder(directory, model).name != report.name:
        report.damaged += report.segments  # not one header says whose they are
        return
    catalog = Catalog()
    log = SegmentLog(Files(), directory, model, 0, catalog, read_only=True)
    try:
        for entry in catalog.entries():
            report.entries[entry.key.component.value] += 1
            report.payload_bytes[entry.key.component.value] += entry.nbytes
            if verify:
                _verify(catalog, report, entry.key)
    finally:
        log.close()
    counts = catalog.counts()
    report.damaged += counts.get("damaged", 0)
    report.foreign += counts["foreign"] - log.num_other_segments
    report.unreadable += counts.get("read_errors", 0)


def _verify(catalog: Catalog, report: ModelReport, key: Key) -> None:
    (slot,) = catalog.pin([key])
    assert slot is not None
    try:
        report.damaged += not slot.segment.read(slot, slot.entry.new_buffers())
    except OSError:
        report.unreadable += 1
    finally:
        slot.segment.unpin()


def _model_of(paths: list[Path]) -> bytes | None:
    """The whole name of a folder's model, from the first header that is sound."""
    for path in paths:
        try:
            with open(open_regular(path, os.O_RDONLY), "rb") as file:
                header = decode_header(file.read(HEADER.size))
        except OSError:
            continue
        if header is not None and model_folder(path.parent.parent, header.model) == path.parent:
            return header.model
    return None


def _last_change(paths: list[Path]) -> float:
    return max(path.lstat().st_mtime for path in paths)
