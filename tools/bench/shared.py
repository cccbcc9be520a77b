"""What the benchmarks share: a command line, parts of a report, ways compared in turn, timed steps.

A machine's speed drifts over minutes, and the two runs of a pair share it. So each pair gives a
ratio, and the median of the ratios is reported, never the ratio of two averages.
"""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Annotated, Any

from cyclopts import App

from pippin import LLM, SamplingParams
from pippin.bench.client import LoadClient, TimedReply, parse
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
from pippin.cli.options import SETTINGS, takes_config
from pippin.config import Speculate
from pippin.engine.build_loop import build_loop
from pippin.errors import PippinError
from pippin.offline.llm import Router
from prompts import Prompts

Names = Annotated[list[str] | None, LIST]
Positive = Annotated[float, POSITIVE]
Part = tuple[Table, Any]  # what is printed, and the numbers behind it
WARM_UPS = 2
FEWEST_STEPS = 8


def engine_beside(
    llm: LLM,
    *,
    prefix_cache: bool = True,
    speculate: Speculate | None = None,
) -> LLM:
    """Another engine over the same loaded model, with its own requests, cache and metrics.

    Only one of the two may have requests at a time. It can speculate if the first was loaded to.
    """
    other = copy.copy(llm)
    engine = replace(
        llm.config.engine,
        prefix_cache=prefix_cache,
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


def run(measure: Callable[..., Report], *sections: str, without: tuple[str, ...] = ()) -> None:
    """Run `measure` as a program, with --json, --markdown and the options of config sections.

    A user error is one line on stderr and exit status 1.
    """

    @functools.wraps(measure)
    def publish(*args: Any, outputs: Files = PRINT_ONLY, **kwargs: Any) -> None:
        measure(*args, **kwargs).publish(outputs)

    files = inspect.Parameter(
        "outputs", inspect.Parameter.KEYWORD_ONLY, default=PRINT_ONLY, annotation=Files
    )
    parameters = inspect.signature(measure, eval_str=True).parameters.values()
    publish.__signature__ = inspect.Signature([*parameters, files])  # type: ignore[attr-defined]
    app = App(config=SETTINGS, help_flags=("--help", "-h"))
    app.default(takes_config(*sections, without=without)(publish) if sections else publish)
    try:
        app(sys.argv[1:])
    except PippinError as error:
        fail(error.message, status=1)


def report_parts(
    name: str, parts: Mapping[str, Callable[[], Part]], only: Sequence[str] | None
) -> Report:
    """Measure each part in `only`, by default every one."""
    if unknown := [part for part in only or () if part not in parts]:
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
    """The target and whether `value` meets it; `show` formats the target; empty without one."""
    if at_least == -inf and at_most == inf:
        return ""
    met = "met" if at_least <= value <= at_most else "missed"
    bound = "least" if at_most == inf else "most"
    return f"at {bound} {show.format(at_least if at_most == inf else at_most)}: {met}"


@dataclass(frozen=True)
class Pairs:
    """One number of each way, pair by pair."""

    tried: list[float]
    base: list[float]

    def as_dict(self) -> dict[str, Any]:
        ratios = [tried / base for tried, base in zip(self.tried, self.base, strict=True)]
        quartiles = percentile(ratios, 0.25), percentile(ratios, 0.75)
        return {**asdict(self), "ratio": median(ratios), "quartiles": quartiles}

    def row(
        self, name: str, scale: float = 1.0, *, at_least: float = -inf, at_most: float = inf
    ) -> tuple[str, ...]:
        """For `pairs_table`. `scale`: from the unit of the pairs to the one in `name`."""
        found = self.as_dict()
        medians = (number(median(values) * scale) for values in (self.tried, self.base))
        low, high = found["quartiles"]
        target = verdict(found["ratio"], "{:.2f}x", at_least=at_least, at_most=at_most)
        return (name, *medians, f"{found['ratio']:.3f}x", f"{low:.3f}-{high:.3f}", target)


def pairs_table(title: str, tried: str, base: str, rows: Sequence[tuple[str, ...]]) -> Table:
    """`tried` and `base` name the two ways."""
    return Table(title, ("", tried, base, "median of ratios", "quartiles", "target"), list(rows))


def in_turn(num_pairs: int, tried: Callable[[str], float], base: Callable[[str], float]) -> Pairs:
    """Run both for each pair, in alternating order, each with the pair's name.

    The first pairs only warm up. Garbage is not collected meanwhile: one side would pay for it.
    """
    results: tuple[list[float], list[float]] = ([], [])
    with without_collections():
        for index in range(-WARM_UPS, num_pairs):
            sides = [(tried, results[0]), (base, results[1])]
            for work, into in reversed(sides) if index % 2 else sides:
                result = work(f"pair {index}")
                if index >= 0:
                    into.append(result)
    return Pairs(*results)


@contextmanager
def without_collections() -> Iterator[None]:
    """A garbage collection in the client would look like a pause of the server."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cold_warm(
    name: str, cold: Sequence[TimedReply], warm: Sequence[TimedReply]
) -> tuple[str, dict[str, Any]]:
    """The same prompts without and with a cache: medians, TTFT in seconds."""
    before, after = (median([reply.ttft for reply in side]) for side in (cold, warm))
    return name, {
        "prompt_tokens": warm[0].prompt_tokens or 0,
        "cached_tokens": int(median([reply.cached_tokens or 0 for reply in warm])),
        "cold_ttft": before,
        "warm_ttft": after,
        "share": ratio(after, before),
    }


def cold_warm_table(title: str, rows: Sequence[tuple[str, dict[str, Any]]], most: float) -> Table:
    """`most`: the share of the cold time that is the target."""
    return Table(
        f"{title} (target: at most {most:.0%} of cold)",
        ("prompts", "tokens", "cached", "cold TTFT, ms", "warm TTFT, ms", "warm / cold"),
        [
            (
                name,
                f"{row['prompt_tokens']:,}",
                f"{row['cached_tokens']:,}",
                number(row["cold_ttft"] * 1e3),
                number(row["warm_ttft"] * 1e3),
                f"{row['share']:.1%}",
            )
            for name, row in rows
        ],
    )


async def chat(client: LoadClient, messages: list[dict[str, str]], max_tokens: int) -> TimedReply:
    fields = {"messages": messages, "max_tokens": max_tokens}
    return parse(await (await client.start_stream("/v1/chat/completions", fields)).done)


def prompts_for(llm: LLM, seed: str) -> Prompts:
    """Prompts of an exact length for this model."""
    return Prompts(seed, lambda text: len(llm.text.tokenizer.encode(text)))


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def timed(llm: LLM, prompts: Sequence[str], params: Sequence[SamplingParams]) -> float:
    """Seconds to complete all prompts at once."""
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def last_step(llm: LLM) -> int:
    """The number of the newest step; -1 before the first."""
    return llm.metrics.records[-1].step if llm.metrics.records else -1


def decode_step_seconds(llm: LLM, num_rows: int, since_step: int) -> float:
    """The median over the steps that decoded exactly `num_rows` rows and did nothing else.

    A step's time is from the end of the one before it to its own.
    """
    seconds = [
        after.device_done - before.device_done
        for before, after in itertools.pairwise(llm.metrics.records)
        if after.step == before.step + 1 and after.step >= since_step and not after.after_pause
        if all(r.prefill_tokens == 0 and r.decode_rows == num_rows for r in (before, after))
    ]
    if len(seconds) < FEWEST_STEPS:
        raise BenchError(
            f"only {len(seconds)} steps decoded {num_rows} rows together, "
            f"{FEWEST_STEPS} are needed: generate more tokens"
        )
    return median(seconds)
