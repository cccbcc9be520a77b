"""A finished benchmark as tables, JSON and Markdown, and the arithmetic of what was measured."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from pippin.errors import PippinError
from pippin.version import __version__, installed_versions


class BenchError(PippinError):
    """A server that is out of reach, or what cannot be measured."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie, interpolated between neighbours."""
    return float(np.quantile(values, share)) if values else math.nan


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def ratio(value: float, base: float) -> float:
    """Not a number where there is nothing to compare with."""
    return value / base if base else math.nan


@dataclass(frozen=True)
class Spread:
    """What is worth saying about many measurements of one thing."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(
            count=len(values),
            p50=percentile(values, 0.5),
            p99=percentile(values, 0.99),
            max=max(values, default=math.nan),
        )


LIBRARIES = ("mlx", "mlx-lm", "numpy", "torch", "triton")
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


def say(stage: str) -> None:
    """Print what is being measured now to stderr; the report itself goes to stdout."""
    Console(stderr=True).print(f"[dim]{stage}[/]", highlight=False)


def describe_machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "platform": platform.platform(terse=True),
        "cpus": os.cpu_count(),
        "pippin": __version__,
    }
    return facts | installed_versions(LIBRARIES)


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
