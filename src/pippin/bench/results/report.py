"""A finished benchmark as tables, JSON and Markdown. Measures nothing."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from pippin import __version__
from pippin.bench.errors import BenchError
from pippin.bench.results.stolen import read_ticks

LIBRARIES = ("mlx", "mlx-lm", "numpy", "torch", "triton")
TICKS_AT_START = read_ticks()
BUSY_LOAD = 0.5  # runnable processes besides ours that make timings doubtful


@dataclass(frozen=True)
class Table:
    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Outputs:
    """Files to write besides what is printed.

    Parameters
    ----------
    json
        File for all results as JSON.
    markdown
        File for the tables as Markdown.
    """

    json: Path | None = None
    markdown: Path | None = None


PRINT_ONLY = Outputs()


@dataclass(frozen=True)
class Report:
    name: str  # of the command
    tables: list[Table]
    data: dict[str, Any]  # every number behind the tables
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())

    def publish(self, outputs: Outputs) -> None:
        self.print()
        if outputs.json is not None:
            outputs.json.write_text(self.as_json() + "\n", encoding="utf-8")
        if outputs.markdown is not None:
            outputs.markdown.write_text(self.as_markdown(), encoding="utf-8")

    def print(self) -> None:
        console = Console()
        for table in self.tables:
            console.print(_rich(table))
        for note in self.notes:
            console.print(f"[dim]{note}[/]")
        console.print(f"[dim]{self._machine_line()}[/]", highlight=False)

    def as_json(self) -> str:
        return json.dumps(
            {"benchmark": self.name, "machine": self.machine, **self.data}, indent=2, default=str
        )

    def as_markdown(self) -> str:
        parts = [_markdown(table) for table in self.tables]
        parts += [f"{note}\n" for note in self.notes]
        return "\n".join([*parts, f"{self._machine_line()}\n"])

    def _machine_line(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.machine.items())


Part = tuple[Table, Any]  # what is printed, and the numbers behind it


def report_parts(
    name: str, parts: Mapping[str, Callable[[], Part]], only: Sequence[str] = ()
) -> Report:
    """Measure each part in `only`, by default every one."""
    if unknown := [part for part in only if part not in parts]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(parts)}")
    notes = busy_note()
    found: dict[str, Part] = {}
    for part, measure in parts.items():
        if not only or part in only:
            say(f"measuring: {part}")
            found[part] = measure()
    tables = [table for table, _ in found.values()]
    return Report(name, tables, {part: data for part, (_, data) in found.items()}, notes)


def verdict(value: float, show: str, *, at_least: float = -inf, at_most: float = inf) -> str:
    """The target and whether `value` meets it; `show` formats the target."""
    met = "met" if at_least <= value <= at_most else "missed"
    bound = "least" if at_most == inf else "most"
    return f"at {bound} {show.format(at_least if at_most == inf else at_most)}: {met}"


def say(stage: str) -> None:
    """Print what is being measured now to stderr; the report itself goes to stdout."""
    Console(stderr=True).print(f"[dim]{stage}[/]", highlight=False)


def describe_machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "pippin": __version__,
    }
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    if TICKS_AT_START is not None and (now := read_ticks()) is not None:
        facts["stolen"] = f"{now.stolen_since(TICKS_AT_START):.1%}"
    return facts


def busy_note() -> list[str]:
    """A warning for the report if something else is running: call it before measuring."""
    load = os.getloadavg()[0]
    if load < BUSY_LOAD:
        return []
    return [f"The machine was busy before the run began (load {load:.1f}): take these as noise."]


def number(value: float) -> str:
    """Three digits that mean something."""
    if value != value:
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _rich(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left", title_style="bold")
    for index, name in enumerate(table.header):
        shown.add_column(name, justify="left" if index == 0 else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


def _markdown(table: Table) -> str:
    rule = ["---", *("---:" for _ in table.header[1:])]
    lines = [f"**{table.title}**", ""]
    lines += ["| " + " | ".join(cells) + " |" for cells in (table.header, rule, *table.rows)]
    return "\n".join(lines) + "\n"
