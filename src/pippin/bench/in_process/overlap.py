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
    prompts_for,
)
from pippin.bench.results.pairs import Compared, Pairs, in_turn, pairs_table
from pippin.bench.results.report import Report, busy_note, number, say, verdict
from pippin.bench.results.samples import median
from pippin.config import Config

PROMPT_TOKENS = 24
IDLE_TARGET = 0.05
LOWEST_RATIO = 1.0  # overlap must never make streams slower


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
        raise BenchError("overlap is measured with and without it: remove --no-overlap")
    notes = busy_note()
    with LLM(config=config) as llm:
        cache = config.engine.prefix_cache
        on = llm.beside(prefix_cache=cache, overlap=True)
        off = llm.beside(prefix_cache=cache, overlap=False)

        def turn(engine: LLM, name: str) -> tuple[float, float]:
            """Tokens a second over all streams, and seconds of a step in which all got a token."""
            say(f"{num_streams} streams, {name}, overlap {_on_off(engine)}")
            prompts = prompts_for(llm, f"overlap {name}")
            texts = [prompts.text(PROMPT_TOKENS) for _ in range(num_streams)]
            begun = last_step(engine)
            seconds = generate(engine, texts, max_tokens=num_tokens)
            step = decode_step_seconds(engine, num_streams, since_step=begun + 1)
            return num_streams * num_tokens / seconds, step

        tried, base = in_turn(num_pairs, lambda name: turn(on, name), lambda name: turn(off, name))
        outcome = OverlapOutcome(
            num_streams,
            num_tokens,
            Pairs([rate for rate, _ in tried], [rate for rate, _ in base]),
            Pairs([step for _, step in tried], [step for _, step in base]),
            Account.of(on, num_streams),
            Account.of(off, num_streams),
        )
    return summarize(outcome, notes)


def summarize(outcome: OverlapOutcome, notes: list[str]) -> Report:
    on, off = outcome.with_overlap, outcome.without
    title = (
        f"{outcome.num_streams} streams of {outcome.num_tokens} tokens, "
        f"{len(outcome.rates.base)} pairs"
    )
    table = pairs_table(
        title,
        "overlap",
        "no overlap",
        [
            Compared("all streams, tok/s", outcome.rates, at_least=LOWEST_RATIO),
            Compared("step, ms", outcome.steps, 1e3),
        ],
    )
    idle = verdict(on.device_idle_share, "{:.0%}", at_most=IDLE_TARGET)
    for name, tried, base, target in (
        ("device idle", f"{on.device_idle_share:.1%}", f"{off.device_idle_share:.1%}", idle),
        ("with prompts and joins", f"{on.whole_idle_share:.1%}", f"{off.whole_idle_share:.1%}", ""),
        ("host work, ms a step", *(number(way.host_seconds * 1e3) for way in (on, off)), ""),
        ("of it no longer in the step", f"{outcome.hidden_share:.0%}", "", ""),
    ):
        table.rows.append((name, tried, base, "", "", target))
    data = {
        "streams": outcome.num_streams,
        "tokens": outcome.num_tokens,
        "tokens_per_second": outcome.rates.as_dict(),
        "step_seconds": outcome.steps.as_dict(),
        "hidden_share": outcome.hidden_share,
        "overlap": asdict(on),
        "no_overlap": asdict(off),
    }
    return Report("overlap", [table], data, notes)


def _on_off(engine: LLM) -> str:
    return "on" if engine.config.engine.overlap else "off"
