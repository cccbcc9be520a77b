"""The same work with and without a feature, in turn, by engines that share a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pippin import LLM, SamplingParams
from pippin.bench.report import BenchError, Report
from pippin.cli.bench import Count
from pippin.config import Config
from shared import Names, Part, greedy, in_turn, pairs_table, prompts_for, report_parts, run, timed

PROMPT_TOKENS = 24
LEAST_OVERLAP = 1.0  # times the throughput without: it must never make streams slower
LEAST_CONSTRAINED = 0.97  # times the throughput of free streams
LEAST_FORCED = 1.2  # times the forms a second of one token at a time
MOST_CACHE = 1.03  # times the time of a prompt without a cache
NEW_PROMPT_TOKENS = 2000
GRID = 64  # new prompts share no block of this many tokens

# A reply that never ends, and of which next to nothing is forced: every step makes every mask.
ENDLESS = {"type": "string", "minLength": 1_000_000}
QUESTIONS = (
    *("is_the_customer_satisfied", "has_the_order_been_delivered", "was_the_invoice_correct"),
    *("is_a_refund_requested", "should_support_follow_up", "would_they_recommend_us"),
)
ANSWERS = {"enum": ["yes", "no", "maybe"]}
# A form: the model answers, all else is forced.
FORM = {
    "type": "object",
    "properties": dict.fromkeys(QUESTIONS, ANSWERS),
    "required": list(QUESTIONS),
    "additionalProperties": False,
}


@dataclass(frozen=True)
class FeatureBench:
    llm: LLM
    num_streams: int
    num_tokens: int  # of each stream's reply
    num_pairs: int
    prompt_tokens: int = NEW_PROMPT_TOKENS

    def overlap(self) -> Part:
        """Streams with two steps in flight and with one."""
        on, off = (self.llm.beside(overlap=wanted) for wanted in (True, False))
        free = [greedy(self.num_tokens)] * self.num_streams
        return self._rates(
            f"{self.num_streams} streams of {self.num_tokens} tokens",
            ("overlap", "no overlap"),
            partial(self._rate, on, free),
            partial(self._rate, off, free),
            LEAST_OVERLAP,
        )

    def grammar(self) -> Part:
        """Streams of which half are constrained, and none."""
        if self.num_streams < 2:
            raise BenchError(f"--streams must be at least 2 for grammar, got {self.num_streams}")
        free = greedy(self.num_tokens)
        constrained = replace(free, json_schema=ENDLESS)
        half = [free if number % 2 else constrained for number in range(self.num_streams)]
        return self._rates(
            f"{self.num_streams} streams, half of them constrained and none",
            ("half", "none"),
            partial(self._rate, self.llm, half),
            partial(self._rate, self.llm, [free] * self.num_streams),
            LEAST_CONSTRAINED,
        )

    def forced_chunks(self) -> Part:
        """A reply that is mostly forced, in chunks and one token at a time."""
        params = SamplingParams(max_tokens=512, temperature=0.0, json_schema=FORM)
        chunks, tokens = self.llm.beside(), self.llm.beside(forced_chunks=False)
        return self._rates(
            "Forms",
            ("in chunks", "one by one"),
            partial(self._rate, chunks, [params]),
            partial(self._rate, tokens, [params]),
            LEAST_FORCED,
        )

    def prefix_cache(self) -> Part:
        """New prompts, where the cache cannot help, with it and without."""
        cached, uncached = (self.llm.beside(prefix_cache=wanted) for wanted in (True, False))

        def seconds(engine: LLM, name: str) -> float:
            text = prompts_for(engine, f"cost {name}").text(self.prompt_tokens)
            return timed(engine, [text], [greedy(1)])

        pairs = in_turn(self.num_pairs, partial(seconds, cached), partial(seconds, uncached))
        if cached.metrics.cached_tokens >= GRID:
            raise BenchError(f"{cached.metrics.cached_tokens:,} tokens of new prompts were cached")
        title = f"{self.num_pairs} pairs of new {self.prompt_tokens:,}-token prompts"
        row = pairs.row("time to first token, ms", 1e3, at_most=MOST_CACHE)
        return pairs_table(title, "cache", "no cache", [row]), pairs.as_dict()

    def _rates(
        self,
        title: str,
        names: tuple[str, str],
        tried: Callable[[str], float],
        base: Callable[[str], float],
        at_least: float,
    ) -> Part:
        pairs = in_turn(self.num_pairs, tried, base)
        row = pairs.row("requests a second", at_least=at_least)
        return pairs_table(f"{title}, {self.num_pairs} pairs", *names, [row]), pairs.as_dict()

    def _rate(self, engine: LLM, params: Sequence[SamplingParams], seed: str) -> float:
        """Requests a second, from their prompts to their last tokens."""
        prompts = prompts_for(engine, seed)
        texts = [prompts.text(PROMPT_TOKENS) for _ in params]
        return len(params) / timed(engine, texts, params)


def features(
    config: Config,
    *,
    only: Names = None,
    streams: Count = 8,
    output: Count = 128,
    pairs: Count = 12,
) -> Report:
    """Measure what overlap, grammars, forced chunks and the prefix cache gain or cost.

    Each is compared with the same work without it, in the same process and in turn.

    Parameters
    ----------
    only
        Features to measure: overlap, grammar, forced-chunks, prefix-cache. Default: all.
    streams
        Number of requests in the batch of overlap and grammar.
    output
        Length of their replies, in tokens.
    pairs
        Number of pairs of runs, one of each kind; ratios are computed within a pair.
    """
    engine = config.engine.without_usual_drafts()
    with LLM(config=replace(config, engine=engine)) as llm:
        bench = FeatureBench(llm, streams, output, pairs)
        parts = {
            "overlap": bench.overlap,
            "grammar": bench.grammar,
            "forced-chunks": bench.forced_chunks,
            "prefix-cache": bench.prefix_cache,
        }
        return report_parts("features", parts, only)


if __name__ == "__main__":
    run(features, "model", "engine", without=("prefix_cache", "overlap", "forced_chunks"))
