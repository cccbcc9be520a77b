"""A running server's state as a table, and its prefix cache emptied. Knows no options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pippin.terminal.find_server import connect
from pippin.terminal.server_client import admin_key_of_environment


def show_status(url: str | None) -> None:
    """A line for each value, which is never cut: lines are searched for names."""
    with connect(url, admin_key_of_environment()) as client:
        values = dict(_flatten({"url": client.url, **client.get("/status")}))
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:{width}}  {value:,}" if type(value) is int else f"{name:{width}}  {value}")


def flush_cache(url: str | None) -> None:
    with connect(url, admin_key_of_environment()) as client:
        freed = client.post("/flush_cache")
    print(f"freed {freed['freed_bytes']:,} bytes, kept {freed['kept_bytes']:,}")


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield prefix, value
        return
    for name, inner in value.items():
        yield from _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
