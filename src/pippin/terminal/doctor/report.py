"""The findings as one page of text to paste, and as JSON (schema.json).

Paths of the user's home are shortened to ~.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pippin import __version__

# info: not checked.  ok: checked.  warning: correct, but not as it should be.  wrong: status 1.
Level = Literal["info", "ok", "warning", "wrong"]

SAFE = "serve with --safe, and paste this page into an issue"
ISSUE = "paste this page into an issue"


@dataclass(frozen=True)
class Finding:
    """One line. A warning, or what is wrong, also says what it means and what to do."""

    name: str
    value: str
    level: Level = "info"
    means: str | None = None
    remedy: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)  # for programs

    def __post_init__(self) -> None:
        is_off = self.level in ("warning", "wrong")
        assert is_off == (self.means is not None) == (self.remedy is not None), self.name


def checked(
    name: str, value: str, numbers: Mapping[str, float], *, ok: bool, means: str, remedy: str = SAFE
) -> Finding:
    """`means` and `remedy`: where it is not right."""
    if ok:
        return Finding(name, value, "ok", numbers=numbers)
    return Finding(name, value, "wrong", means, remedy, numbers)


@dataclass(frozen=True)
class Examined:
    """A section that has run."""

    name: str  # stable: programs look for it
    seconds: float
    findings: tuple[Finding, ...]


SCHEMA_VERSION = 1  # raised when a field changes its meaning or is removed; not when one is added
SCHEMA = Path(__file__).with_name("schema.json")
MARKS = {"info": "  ", "ok": "✓ ", "warning": "! ", "wrong": "✗ "}
HOMES = re.compile(r"(?:/Users|/home)/[^/\s:'\"]+")
INDENT = " " * 6


def is_right(examined: Iterable[Examined]) -> bool:
    return not any(found.level == "wrong" for part in examined for found in part.findings)


def as_page(examined: Sequence[Examined], seconds: float) -> str:
    lines = [f"pippin doctor {__version__}: {_verdict(examined)} ({seconds:.0f} s)"]
    for part in examined:
        if part.findings:
            lines += ["", part.name]
            lines += [line for found in part.findings for line in _lines(found)]
    return "\n".join(lines)


def _verdict(examined: Sequence[Examined]) -> str:
    levels = [found.level for part in examined for found in part.findings]
    wrong, warnings = levels.count("wrong"), levels.count("warning")
    said = [f"{_count(wrong, 'check')} failed"] if wrong else []
    said += [_count(warnings, "warning")] if warnings else []
    return ", ".join([*(said or ["all right"]), f"{_count(levels.count('ok'), 'check')} passed"])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _lines(found: Finding) -> Iterator[str]:
    yield f"  {MARKS[found.level]}{found.name}: {private(found.value)}"
    if found.means is not None and found.remedy is not None:
        yield f"{INDENT}meaning: {private(found.means)}"
        yield f"{INDENT}what to do: {private(found.remedy)}"


def as_document(examined: Sequence[Examined], seconds: float) -> dict[str, Any]:
    return {
        "schema": SCHEMA_VERSION,
        "pippin": __version__,
        "ok": is_right(examined),
        "seconds": round(seconds, 2),
        "sections": [
            {
                "name": part.name,
                "seconds": part.seconds,
                "findings": [_entry(found) for found in part.findings],
            }
            for part in examined
        ],
    }


def _entry(found: Finding) -> dict[str, Any]:
    return {
        "name": found.name,
        "level": found.level,
        "value": private(found.value),
        "means": None if found.means is None else private(found.means),
        "remedy": None if found.remedy is None else private(found.remedy),
        "numbers": {key: n for key, n in found.numbers.items() if math.isfinite(n)},  # JSON's
    }


def private(text: str) -> str:
    """Without the user's name."""
    home = str(Path.home())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?=[/\s:'\",;)]|$)", "~", text)
    return HOMES.sub("~", text)
