"""Models in the hub's cache (`pippin pull`, `list`, `rm`), and prefix caches on disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from pippin import hub
from pippin.amounts import show_bytes
from pippin.cache.disk import disk_store
from pippin.cache.disk.disk_store import ModelReport, look
from pippin.cli.commands import flush
from pippin.cli.options import Flag
from pippin.errors import ConfigError
from pippin.hub import CachedModel
from pippin.startup.resolve import is_servable

HubId = Annotated[str, Parameter(help="Hugging Face id, such as Qwen/Qwen3.5-0.8B.")]


def pull(model: HubId, *, revision: str | None = None, json: Flag = False) -> None:
    """
    Parameters
    ----------
    revision
        Branch, tag or commit. Default: the main branch.
    json
        Print the progress as lines of JSON, as /api/pull of Ollama's API does.
    """
    if json:
        raise SystemExit(hub.pull_as_lines(model, revision))
    print(f"{model} is at {hub.pull(model, revision)}")


def list_models(*, json: Flag = False) -> None:
    """
    Parameters
    ----------
    json
        Print the list as JSON.
    """
    described = [_describe(model) for model in hub.cached_models()]
    if json:
        print(dumps(described, indent=2))
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


def rm(model: HubId, *, yes: Flag = False) -> None:
    """
    Parameters
    ----------
    yes
        Delete without asking.
    """
    found = hub.find_cached_model(model)
    if not yes and not _confirm(found):
        print("Nothing was deleted.")
        return
    freed = hub.delete_cached_model(found)
    print(f"Deleted {found.name}: {freed:,} bytes freed.")


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


cache = App(name="cache")
cache.command(flush)

CacheDir = Annotated[
    Path,
    Parameter(
        env_var="PIPPIN_CACHE_DIR", help="Directory of prefix caches, as in serve --cache-dir."
    ),
]


@cache.command
def show(*, cache_dir: CacheDir) -> None:
    """Print the size and the entries of a cache directory, by model. Its server may be running."""
    reports = list(look(cache_dir))
    if not reports:
        print(f"{cache_dir} has no prefix cache.")
        return
    Console().print(_table(reports))
    print(f"{sum(report.nbytes for report in reports):,} bytes in all")


@cache.command
def verify(*, cache_dir: CacheDir) -> None:
    """Read a cache directory and verify its checksums. Exit status 1 if an entry is damaged.

    Its server may be running. Nothing is changed: a server deletes damaged entries itself.
    """
    reports = list(look(cache_dir, verify=True))
    entries = sum(sum(report.entries.values()) for report in reports)
    nbytes = sum(sum(report.payload_bytes.values()) for report in reports)
    damaged = sum(report.damaged for report in reports)
    unreadable = sum(report.unreadable for report in reports)
    print(f"{entries:,} entries, {nbytes:,} bytes read: {damaged} damaged, {unreadable} unreadable")
    raise SystemExit(1 if damaged or unreadable else 0)


@cache.command
def empty(*, cache_dir: CacheDir) -> None:
    """Delete everything from a cache directory that no running server uses.

    For the cache of a running server use `pippin cache flush`.
    """
    print(f"freed {disk_store.empty(cache_dir):,} bytes")


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
