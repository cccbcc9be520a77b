"""Cache directories in the terminal: tables and exit statuses. Knows no server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pippin.cache.disk.inspection import ModelReport, empty, look


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
