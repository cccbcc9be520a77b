"""`pippin list` and `pippin rm`: the models in the hub's cache. Knows no options."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pippin.amounts import show_bytes
from pippin.cache.disk.disk_store import ModelReport, empty, look
from pippin.errors import ConfigError
from pippin.hub import (
    CachedModel,
    cached_models,
    delete_cached_model,
    find_cached_model,
)
from pippin.startup.resolve import is_servable


def list_models(*, as_json: bool) -> None:
    described = [_describe(model) for model in cached_models()]
    if as_json:
        print(json.dumps(described, indent=2))
        return
    if not described:
        print("No model is in the Hugging Face hub's cache. `pippin pull MODEL` downloads one.")
        return
    table = Table("model", "size", "last used", "can be served", box=None)
    for model in described:
        reason = f": {model['reason']}" if model["reason"] else ""
        used = model["last_used"].replace("T", " ").removesuffix("+00:00")
        table.add_row(
            model["name"], show_bytes(model["bytes"]), used, f"{model['servable']}{reason}"
        )
    Console().print(table)


def remove_model(name: str, *, confirmed: bool) -> None:
    model = find_cached_model(name)
    if not confirmed and not _confirm(model):
        print("Nothing was deleted.")
        return
    freed = delete_cached_model(model)
    print(f"Deleted {model.name}: {freed:,} bytes freed.")


def _describe(model: CachedModel) -> dict[str, Any]:
    servable, reason = ("unknown", "") if model.snapshot is None else is_servable(model.snapshot)
    server = model.server()
    return {
        "name": model.name,
        "bytes": model.nbytes,
        "last_used": datetime.fromtimestamp(model.used_s, UTC).isoformat(timespec="seconds"),
        "servable": servable,
        "reason": reason,
        "path": str(model.snapshot or model.path),
        "served_at": None if server is None else server.url,
    }


def _confirm(model: CachedModel) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(f"rm of {model.name} asks first, and there is no terminal: use --yes")
    asked = f"Delete {model.name} ({show_bytes(model.nbytes)}) from {model.path}? [y/N] "
    return input(asked).strip().lower() in ("y", "yes")


def show_directory(directory: Path) -> None:
    reports = list(look(directory))
    if not reports:
        print(f"{directory} has no prefix cache.")
        return
    Console().print(_table(reports))
    print(f"{sum(report.nbytes for report in reports):,} bytes in all")


def verify_directory(directory: Path) -> int:
    """Returns the exit status."""
    reports = list(look(directory, verify=True))
    entries = sum(sum(report.entries.values()) for report in reports)
    nbytes = sum(sum(report.payload_bytes.values()) for report in reports)
    damaged = sum(report.damaged for report in reports)
    unreadable = sum(report.unreadable for report in reports)
    print(f"{entries:,} entries, {nbytes:,} bytes read: {damaged} damaged, {unreadable} unreadable")
    return 1 if damaged or unreadable else 0


def empty_directory(directory: Path) -> None:
    print(f"freed {empty(directory):,} bytes")


def _table(reports: list[ModelReport]) -> Table:
    table = Table(box=None)
    table.add_column("model")
    table.add_column("written")
    for name in ("files", "bytes", "component", "entries", "payload"):
        table.add_column(name, justify="left" if name == "component" else "right")
    for report in reports:
        for row in _rows(report):
            table.add_row(*row)
    return table


def _rows(report: ModelReport) -> Iterator[tuple[str, ...]]:
    """A line for each component; the first one names the model."""
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.written))
    first = (report.name[:12], written, str(2 * report.segments), f"{report.nbytes:,}")
    for component, entries in sorted(report.entries.items()) or [("", 0)]:
        yield *first, component, f"{entries:,}", f"{report.payload_bytes[component]:,}"
        first = ("", "", "", "")
