"""What the benchmarks share: a command line, parts of a report, and ways compared in turn.

A machine's speed drifts over minutes, and the two runs of a pair share it. So each pair gives a
ratio, and the median of the ratios is reported, never the ratio of two averages.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Annotated, Any, TypeVar

from cyclopts import App

from pippin.bench.client import LoadClient, Recording, TimedReply
from pippin.bench.report import (
    PRINT_ONLY,
    BenchError,
    Report,
    Table,
    busy_note,
    median,
    number,
    percentile,
    ratio,
    say,
)
from pippin.bench.serve import LIST, POSITIVE, Files
from pippin.cli import fail
from pippin.cli.options import takes_config
from pippin.cli.settings import SETTINGS
from pippin.config import EngineConfig, Speculate
from pippin.engine.build_loop import build_loop
from pippin.errors import PippinError
from pippin.offline.llm import LLM, Router

DEFAULT_ROWS = 64
Names = Annotated[list[str] | None, LIST]
Positive = Annotated[float, POSITIVE]
T = TypeVar("T")
WARM_UPS = 2


def without_usual_drafts(engine: EngineConfig) -> EngineConfig:
    """Drafts only where they are asked for: what is timed is to depend on what is given alone."""
    return replace(engine, speculate=engine.speculate or "off")


def with_rows(engine: EngineConfig, num_rows: int) -> EngineConfig:
    """At least so many requests run at the same time."""
    given = DEFAULT_ROWS if engine.max_running == "auto" else engine.max_running
    return replace(engine, max_running=max(given, num_rows))


def engine_beside(
    llm: LLM,
    *,
    prefix_cache: bool = True,
    overlap: bool = True,
    forced_chunks: bool = True,
    speculate: Speculate | None = None,
) -> LLM:
    """Another engine over the same loaded model, with its own requests, cache and metrics.

    Only one of the two may have requests at a time. It can speculate if the first was loaded to.
    """
    other = copy.copy(llm)
    engine = replace(
        llm.config.engine,
        prefix_cache=prefix_cache,
        overlap=overlap,
        forced_chunks=forced_chunks,
        speculate=speculate or llm.config.engine.speculate,
        host_cache=None,  # which one engine has to itself
        cache_dir=None,  # likewise
        disk=None,
    )
    other.config = replace(llm.config, engine=engine)
    backend = llm.loop.backend
    other.loop = build_loop(other.config, lambda _: None, for_streams=False, backend=backend)
    other._router = Router(other.loop)
    return other


def command(
    measure: Callable[..., Report], *sections: str, without: tuple[str, ...] = ()
) -> Callable[..., None]:
    """`measure` with --json and --markdown, and the options of config sections for its `config`."""

    @functools.wraps(measure)
    def publish(*args: Any, outputs: Files = PRINT_ONLY, **kwargs: Any) -> None:
        measure(*args, **kwargs).publish(outputs)

    files = inspect.Parameter(
        "outputs", inspect.Parameter.KEYWORD_ONLY, default=PRINT_ONLY, annotation=Files
    )
    signature = inspect.signature(measure, eval_str=True)
    parameters = [*signature.parameters.values(), files]
    publish.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return takes_config(*sections, without=without)(publish) if sections else publish


def run(measure: Callable[..., Report], *sections: str, without: tuple[str, ...] = ()) -> None:
    """Run `measure` as a program. A user error is one line on stderr and exit status 1."""
    app = App(config=SETTINGS, help_flags=("--help", "-h"))
    app.default(command(measure, *sections, without=without))
    try:
        app(sys.argv[1:])
    except PippinError as error:
        fail(error.message, status=1)


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


@dataclass(frozen=True)
class Pairs:
    """One number of each way, pair by pair."""

    tried: list[float]
    base: list[float]

    @property
    def ratios(self) -> list[float]:
        return [tried / base for tried, base in zip(self.tried, self.base, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the ratios lie between these."""
        return percentile(self.ratios, 0.25), percentile(self.ratios, 0.75)

    def as_dict(self) -> dict[str, object]:
        return {
            "tried": self.tried,
            "base": self.base,
            "ratio": self.ratio,
            "quartiles": self.quartiles,
        }


@dataclass(frozen=True)
class Compared:
    """One row of a table: a number of each way, and which ratio is wanted."""

    name: str
    pairs: Pairs
    scale: float = 1.0  # from the unit of the pairs to the one in `name`
    at_least: float | None = None
    at_most: float | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        pairs = self.pairs
        medians = (number(median(values) * self.scale) for values in (pairs.tried, pairs.base))
        low, high = pairs.quartiles
        target = ""
        if self.at_least is not None:
            target = verdict(pairs.ratio, "{:.2f}x", at_least=self.at_least)
        elif self.at_most is not None:
            target = verdict(pairs.ratio, "{:.2f}x", at_most=self.at_most)
        return (self.name, *medians, f"{pairs.ratio:.3f}x", f"{low:.3f}-{high:.3f}", target)


def pairs_table(title: str, tried: str, base: str, rows: Sequence[Compared]) -> Table:
    """`tried` and `base` name the two ways."""
    header = ("", tried, base, "median of ratios", "quartiles", "target")
    return Table(title, header, [row.cells for row in rows])


def in_turn(
    num_pairs: int, tried: Callable[[str], T], base: Callable[[str], T]
) -> tuple[list[T], list[T]]:
    """Run both for each pair, in alternating order, each with the pair's name.

    The first pairs only warm up. Garbage is not collected meanwhile: one side would pay for it.
    """
    if num_pairs < 1:
        raise BenchError(f"pairs must be at least 1, got {num_pairs}")
    results: tuple[list[T], list[T]] = ([], [])
    gc.collect()
    gc.disable()
    try:
        for index in range(-WARM_UPS, num_pairs):
            sides = [(tried, results[0]), (base, results[1])]
            for work, into in reversed(sides) if index % 2 else sides:
                result = work(f"pair {index}")
                if index >= 0:
                    into.append(result)
    finally:
        gc.enable()
    return results


@dataclass(frozen=True)
class ColdWarm:
    """The same prompts without and with a cache. TTFT in seconds, medians."""

    name: str
    prompt_tokens: int
    cached_tokens: int
    cold_ttft: float
    warm_ttft: float
    share: float

    @classmethod
    def of(cls, name: str, cold: Sequence[TimedReply], warm: Sequence[TimedReply]) -> ColdWarm:
        cold_ttft, warm_ttft = (median([reply.ttft for reply in side]) for side in (cold, warm))
        return cls(
            name=name,
            prompt_tokens=warm[0].prompt_tokens or 0,
            cached_tokens=int(median([reply.cached_tokens or 0 for reply in warm])),
            cold_ttft=cold_ttft,
            warm_ttft=warm_ttft,
            share=ratio(warm_ttft, cold_ttft),
        )


def cold_warm_table(title: str, rows: Sequence[ColdWarm], most: float) -> Table:
    """`most`: the share of the cold time that is the target."""
    return Table(
        f"{title} (target: at most {most:.0%} of cold)",
        ("prompts", "tokens", "cached", "cold TTFT, ms", "warm TTFT, ms", "warm / cold"),
        [
            (
                row.name,
                f"{row.prompt_tokens:,}",
                f"{row.cached_tokens:,}",
                number(row.cold_ttft * 1e3),
                number(row.warm_ttft * 1e3),
                f"{row.share:.1%}",
            )
            for row in rows
        ],
    )


@contextmanager
def without_collections() -> Iterator[None]:
    """A garbage collection in the client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def chat(client: LoadClient, messages: list[dict[str, str]], max_tokens: int) -> Recording:
    fields = {"messages": messages, "max_tokens": max_tokens}
    return await (await client.start_stream("/v1/chat/completions", fields)).done
