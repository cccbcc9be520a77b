"""What `bench compare` runs: the scenarios, their numbers, and the target of each.

Some targets hold for the bundled hybrid model alone, whose prefill mlx-lm does token by token off
Metal; others for any checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pippin.bench.client.wire import LoadClient
from pippin.bench.errors import BenchError
from pippin.bench.prompts import Prompts
from pippin.bench.results.report import verdict
from pippin.bench.results.samples import ratio
from pippin.bench.served.scenarios import (
    BRANCHES,
    CONVERSATIONS,
    LONG_TOKENS,
    PROMPT_TOKENS,
    REPEATED_TOKENS,
    REPLY_TOKENS,
    RUNNING_STREAMS,
    SYSTEM_TOKENS,
    TINY_TOKENS,
    TURNS,
    Numbers,
    branches,
    cold_prompt,
    conversations,
    interference,
    repeated_prompt,
    short_beside_long,
    streams,
)

LONGER_REPLY_TOKENS = 50
DECODE_TARGETS = {True: (1.6, 1.8, 1.8, 1.8), False: (1.3, 1.5, 1.5, 1.5)}  # by: bundled

Run = Callable[[LoadClient, Prompts], Coroutine[Any, Any, Numbers]]


@dataclass(frozen=True)
class Measure:
    """One number of a scenario."""

    name: str
    unit: str
    higher_is_better: bool = False
    times_better: float | None = None  # the least that is wanted
    at_most: float | None = None  # the most that is wanted, of our own number

    def verdict(self, ours: float, theirs: float) -> str:
        """The target and whether it is met; empty without one."""
        if self.times_better is not None:
            return verdict(self.advantage(ours, theirs), "{:g}x", at_least=self.times_better)
        if self.at_most is not None:
            return f"ours {verdict(ours, '{:g}', at_most=self.at_most)}"
        return ""

    def advantage(self, ours: float, theirs: float) -> float:
        """How many times better ours is."""
        return ratio(ours, theirs) if self.higher_is_better else ratio(theirs, ours)


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    measures: tuple[Measure, ...]
    run: Run


def choose(names: Sequence[str], *, bundled: bool = True) -> list[Scenario]:
    """The scenarios of these names; a name without a number takes all that start so."""
    scenarios = all_scenarios(bundled=bundled)
    known = {s.name for s in scenarios} | {_family(s) for s in scenarios}
    if unknown := [name for name in names if name not in known]:
        raise BenchError(
            f"no scenario {unknown[0]!r}; there are {', '.join(s.name for s in scenarios)}"
        )
    return [s for s in scenarios if not names or s.name in names or _family(s) in names]


def _family(scenario: Scenario) -> str:
    return scenario.name.split("-")[0]


def all_scenarios(*, bundled: bool = True) -> tuple[Scenario, ...]:
    """With the targets for the bundled model, or for any other."""

    def if_bundled(times_better: float) -> float | None:
        return times_better if bundled else None

    return (
        Scenario(
            "prefill",
            f"cold prompt of {PROMPT_TOKENS:,} tokens",
            (
                Measure("prefill", "tok/s", higher_is_better=True, times_better=if_bundled(2.5)),
                Measure("TTFT", "s"),
            ),
            cold_prompt,
        ),
        *(
            _decode(n, target)
            for n, target in zip((1, 4, 8, 16), DECODE_TARGETS[bundled], strict=True)
        ),
        Scenario(
            "repeat",
            f"the same prompt of {REPEATED_TOKENS:,} tokens again",
            (
                Measure("TTFT again", "ms", times_better=1.0),
                Measure("of its cold TTFT", "%", at_most=3.0),
            ),
            repeated_prompt,
        ),
        Scenario(
            "beside",
            f"a {TINY_TOKENS}-token prompt beside one of {LONG_TOKENS:,}",
            (
                Measure("short TTFT", "ms"),
                Measure("of the long one's", "%", at_most=20.0),
                Measure("long / alone", "x", at_most=1.1),
            ),
            short_beside_long,
        ),
        Scenario(
            "interference",
            f"{RUNNING_STREAMS} streams while {PROMPT_TOKENS:,}-token prompts arrive",
            (
                Measure("busy gap p99", "ms"),
                Measure("idle gap p50", "ms"),
                Measure("busy / idle", "x", at_most=4.0),
                Measure("longest stop", "ms"),
                Measure("prompt TTFT", "s", times_better=2.0),
            ),
            interference,
        ),
        Scenario(
            "branches",
            f"{BRANCHES} branches of one {PROMPT_TOKENS:,}-token prompt at once",
            (Measure("TTFT p50", "s", times_better=if_bundled(8.0)), Measure("total", "s")),
            branches,
        ),
        _chats(CONVERSATIONS, REPLY_TOKENS, total=if_bundled(2.5), ttft=if_bundled(5.0)),
        _chats(4, LONGER_REPLY_TOKENS, total=2.0),
    )


def _decode(num_streams: int, times_better: float) -> Scenario:
    return Scenario(
        name=f"decode-{num_streams}",
        title=f"{num_streams} stream{'s that start together' if num_streams > 1 else ''}",
        measures=(
            Measure("decode", "tok/s", higher_is_better=True, times_better=times_better),
            Measure("gap p99", "ms", times_better=1.0),
        ),
        run=partial(streams, num_streams=num_streams),
    )


def _chats(
    at_once: int, reply_tokens: int, *, total: float | None, ttft: float | None = None
) -> Scenario:
    return Scenario(
        name=f"chats-{at_once}",
        title=f"{CONVERSATIONS} conversations x {TURNS} turns, {at_once} at a time, replies of "
        f"{reply_tokens} tokens, a shared {SYSTEM_TOKENS}-token start",
        measures=(
            Measure("total", "s", times_better=total),
            Measure("TTFT p50", "s", times_better=ttft),
        ),
        run=partial(conversations, at_once=at_once, reply_tokens=reply_tokens),
    )
