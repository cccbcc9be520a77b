"""`pippin bench overlap`: the same streams with two steps in flight and with one, in turn.

Both engines share one loaded model in one process. Knows only the offline API.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pippin import LLM
from pippin.bench.errors import BenchError
from pippin.bench.in_process.steps import (
    decode_idle_share,
    decode_step_seconds,
    generate,
    host_step_seconds,
    last_step,
    make_ready,
    prompts_for,
)
from pippin.bench.pairs import Pairs, in_turn
from pippin.bench.results.plot import Goal, Lines
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.config import Config

PROMPT_TOKENS = 24
IDLE_TARGET = 0.05
LOWEST_RATIO = 1.0  # overlap must never make streams slower


@dataclass(frozen=True)
class StreamTimes:
    """All streams from their prompts to their last tokens."""

    tokens_per_second: float
    step_seconds: float  # the median of steps in which every stream got a token


@dataclass(frozen=True)
class Account:
    """What an engine's own records say, over its last steps."""

    device_idle_share: float  # of steps in which every stream got a token
    whole_idle_share: float  # of all steps, prompts and joins included
    host_seconds: float  # of a step: planning, building the graph, committing

    @classmethod
    def of(cls, llm: LLM, num_streams: int) -> Account:
        host = host_step_seconds(llm, num_streams)
        idle = decode_idle_share(llm, num_streams)
        return cls(idle, llm.metrics.device_idle_share, host)


@dataclass(frozen=True)
class OverlapOutcome:
    num_streams: int
    num_tokens: int  # of each stream
    rates: Pairs  # tokens a second, with overlap over without
    steps: Pairs  # seconds a step
    with_overlap: Account
    without: Account

    @property
    def hidden_share(self) -> float:
        """How much shorter a step got, of the host's work that was in it."""
        pairs = zip(self.steps.tried, self.steps.base, strict=True)
        return median([base - tried for tried, base in pairs]) / self.without.host_seconds


def overlap(config: Config, *, num_streams: int, num_tokens: int, num_pairs: int) -> Report:
    if not config.engine.overlap:
        raise BenchError("overlap is measured with and without it: leave --no-overlap away")
    notes = busy_note()
    with LLM(config=config) as llm:
        make_ready(llm)
        cache = config.engine.prefix_cache
        on = llm.beside(prefix_cache=cache, overlap=True)
        off = llm.beside(prefix_cache=cache, overlap=False)

        def turn(engine: LLM, name: str) -> StreamTimes:
            say(f"{num_streams} streams, {name}, overlap {_on_off(engine)}")
            prompts = prompts_for(llm, f"overlap {name}")
            texts = [prompts.text(PROMPT_TOKENS) for _ in range(num_streams)]
            begun = last_step(engine)
            seconds = generate(engine, texts, max_tokens=num_tokens)
            step = decode_step_seconds(engine, num_streams, since_step=begun + 1)
            return StreamTimes(num_streams * num_tokens / seconds, step)

        tried, base = in_turn(num_pairs, lambda name: turn(on, name), lambda name: turn(off, name))
        outcome = OverlapOutcome(
            num_streams,
            num_tokens,
            Pairs([t.tokens_per_second for t in tried], [t.tokens_per_second for t in base]),
            Pairs([t.step_seconds for t in tried], [t.step_seconds for t in base]),
            Account.of(on, num_streams),
            Account.of(off, num_streams),
        )
    return summarize(outcome, notes)


def summarize(outcome: OverlapOutcome, notes: list[str]) -> Report:
    rates, steps = outcome.rates, outcome.steps
    on, off = outcome.with_overlap, outcome.without
    met = "met" if rates.ratio >= LOWEST_RATIO else "missed"
    idle = "met" if on.device_idle_share <= IDLE_TARGET else "missed"
    rows: list[tuple[str, ...]] = [
        _row("all streams, tok/s", rates, 1.0, f"at least {LOWEST_RATIO:.2f}x: {met}"),
        _row("step, ms", steps, 1e3, ""),
        (
            "device idle",
            f"{on.device_idle_share:.1%}",
            f"{off.device_idle_share:.1%}",
            "",
            "",
            f"at most {IDLE_TARGET:.0%}: {idle}",
        ),
        (
            "with prompts and joins",
            f"{on.whole_idle_share:.1%}",
            f"{off.whole_idle_share:.1%}",
            *("", "", ""),
        ),
        ("host work, ms a step", number(on.host_seconds * 1e3), number(off.host_seconds * 1e3))
        + ("",) * 3,
        ("of it no longer in the step", f"{outcome.hidden_share:.0%}", "") + ("",) * 3,
    ]
    header = ("", "overlap", "no overlap", "median of ratios", "quartiles", "target")
    title = f"{outcome.num_streams} streams of {outcome.num_tokens} tokens, {len(rates.base)} pairs"
    numbered = {
        name: [(float(index), rate) for index, rate in enumerate(values, start=1)]
        for name, values in (("overlap", rates.tried), ("no overlap", rates.base))
    }
    return Report(
        name="overlap",
        tables=[Table(title, header, rows)],
        charts=[
            Lines(f"{outcome.num_streams} streams", "pair", "tok/s over all streams", numbered),
            _ratio_chart(rates),
        ],
        data={
            "streams": outcome.num_streams,
            "tokens": outcome.num_tokens,
            "tokens_per_second": rates.as_dict(),
            "step_seconds": steps.as_dict(),
            "hidden_share": outcome.hidden_share,
            "overlap": asdict(on),
            "no_overlap": asdict(off),
        },
        notes=notes,
    )


def _row(name: str, pairs: Pairs, factor: float, target: str) -> tuple[str, ...]:
    low, high = pairs.quartiles
    medians = (number(median(values) * factor) for values in (pairs.tried, pairs.base))
    return (name, *medians, f"{pairs.ratio:.3f}x", f"{low:.3f}-{high:.3f}", target)


def _ratio_chart(rates: Pairs) -> Lines:
    limit = (LOWEST_RATIO - 1) * 100
    return Lines(
        "What overlap adds to the throughput",
        "pair",
        "extra tok/s, %",
        rates.extra_percent,
        target=Goal(limit, f"target: at least {limit:g}%"),
    )


def _on_off(engine: LLM) -> str:
    return "on" if engine.config.engine.overlap else "off"
