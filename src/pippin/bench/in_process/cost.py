"""What the prefix cache costs where it cannot help: prompts nobody has seen, with it and without.

Both engines share one loaded model in one process and take turns. Knows only the offline API.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from pippin import LLM
from pippin.bench.errors import BenchError
from pippin.bench.in_process.steps import first_token_seconds, generate, last_step, prompts_for
from pippin.bench.pairs import Pairs, in_turn
from pippin.bench.results.plot import Goal, Lines
from pippin.bench.results.report import Table, number, say
from pippin.bench.results.samples import median
from pippin.config import Config

HIGHEST_RATIO = 1.03
GRID = 64  # prompts share no block of this many tokens
REPLY_TOKENS = 8  # so that a decode step follows the prompt in both engines


@dataclass(frozen=True)
class RequestTimes:
    ttft: float  # seconds to the first token
    total: float  # ... and until the request is gone and what it leaves is in the cache


@dataclass(frozen=True)
class Cost:
    """Seconds with a cache over seconds without."""

    prompt_tokens: int
    ttft: Pairs
    total: Pairs

    @property
    def table(self) -> Table:
        verdict = "met" if self.ttft.ratio <= HIGHEST_RATIO else "missed"
        target = f"at most {HIGHEST_RATIO - 1:+.0%}: {verdict}"
        header = ("", "cache, ms", "no cache, ms", "median of ratios", "quartiles", "target")
        rows = [
            (*_row("time to the first token", self.ttft), target),
            (*_row("until the request is gone", self.total), ""),
        ]
        count = len(self.ttft.base)
        title = f"What the cache costs: {count} pairs of new {self.prompt_tokens:,}-token prompts"
        return Table(title, header, rows)

    @property
    def chart(self) -> Lines:
        limit = (HIGHEST_RATIO - 1) * 100
        return Lines(
            f"What the cache costs on new {self.prompt_tokens:,}-token prompts",
            "pair",
            "extra time to the first token, %",
            self.ttft.extra_percent,
            target=Goal(limit, f"target: at most {limit:g}%"),
        )

    def as_dict(self) -> dict[str, object]:
        return {"ttft": self.ttft.as_dict(), "total": self.total.as_dict()}


def cache_cost(config: Config, *, prompt_tokens: int, num_pairs: int) -> Cost:
    engine = dataclasses.replace(config.engine, prefix_cache=True)
    with LLM(config=dataclasses.replace(config, engine=engine)) as cached:
        uncached = cached.beside(prefix_cache=False, overlap=engine.overlap)

        def turn(llm: LLM, name: str) -> RequestTimes:
            text = prompts_for(llm, f"cost {name}").text(prompt_tokens)
            begun = last_step(llm)
            total = generate(llm, [text], max_tokens=REPLY_TOKENS)
            return RequestTimes(first_token_seconds(llm, since_step=begun + 1), total)

        say(f"measuring: cost, {num_pairs} pairs")
        tried, base = in_turn(
            num_pairs, lambda name: turn(cached, name), lambda name: turn(uncached, name)
        )
        if cached.metrics.cached_tokens >= GRID:
            raise BenchError(f"{cached.metrics.cached_tokens:,} tokens of new prompts were cached")
    return Cost(
        prompt_tokens,
        Pairs([t.ttft for t in tried], [t.ttft for t in base]),
        Pairs([t.total for t in tried], [t.total for t in base]),
    )


def _row(name: str, pairs: Pairs) -> tuple[str, ...]:
    low, high = pairs.quartiles
    medians = (number(median(values) * 1e3) for values in (pairs.tried, pairs.base))
    return (name, *medians, f"{pairs.ratio - 1:+.1%}", f"{low - 1:+.1%} to {high - 1:+.1%}")
