"""What a section of `pippin doctor` reports. Knows no device and prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

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
    name: str,
    value: str,
    *,
    ok: bool,
    means: str,
    remedy: str = SAFE,
    numbers: Mapping[str, float] | None = None,
) -> Finding:
    """`means` and `remedy`: where it is not right."""
    if ok:
        return Finding(name, value, "ok", numbers=numbers or {})
    return Finding(name, value, "wrong", means, remedy, numbers or {})


class TimeLimit:
    """What may be left out is not started once this much time has passed."""

    def __init__(self, seconds: float, now: Callable[[], float] = monotonic) -> None:
        self.seconds = seconds
        self._now = now
        self._started = now()

    def passed(self) -> float:
        return self._now() - self._started

    def left(self) -> float:
        return max(self.seconds - self.passed(), 0.0)


@dataclass(frozen=True)
class Section:
    name: str  # stable: programs look for it
    doing: str  # shown while it runs
    look: Callable[[], Iterator[Finding]]


@dataclass(frozen=True)
class Examined:
    """A section that has run."""

    name: str
    seconds: float
    findings: tuple[Finding, ...]
