"""The same work with and without a feature, in turn.

overlap         streams with two steps in flight and with one
grammar         streams of which half are constrained, and none
forced-chunks   a reply that is mostly forced, in chunks and one token at a time
prefix-cache    new prompts, where the cache cannot help, with it and without

All engines share one loaded model in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pippin import LLM, SamplingParams
from pippin.bench.report import BenchError, Report, median, number
from pippin.bench.serve import Count
from pippin.config import Config
from shared import (
    Compared,
    Names,
    Pairs,
    Part,
    engine_beside,
    in_turn,
    pairs_table,
    report_parts,
    run,
    verdict,
    without_usual_drafts,
)
from steps import (
    decode_idle_share,
    decode_step_seconds,
    first_token_seconds,
    host_step_seconds,
    last_step,
    prompts_for,
    timed,
)

PROMPT_TOKENS = 24
LEAST_OVERLAP = 1.0  # times the throughput without: it must never make streams slower
MOST_IDLE = 0.05  # of the time, the device with overlap
LEAST_CONSTRAINED = 0.97  # times the throughput of free streams
LEAST_FORCED = 1.2  # times the forms a second of one token at a time
MOST_CACHE = 1.03  # times the time to first token without a cache
NEW_PROMPT_TOKENS = 2000
NEW_REPLY_TOKENS = 8  # so that a decode step follows the prompt in both engines
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
IDLE_SHARES = ("device_idle_share", "whole_idle_share")  # of decode steps, and of all
Way = TypeVar("Way")


@dataclass(frozen=True)
class FeatureBench:
    llm: LLM
    num_streams: int
    num_tokens: int  # of each stream's reply
    num_pairs: int
    prompt_tokens: int = NEW_PROMPT_TOKENS

    def overlap(self) -> Part:
        on, off = (engine_beside(self.llm, overlap=wanted) for wanted in (True, False))
        free = [self._params()] * self.num_streams

        def turn(engine: LLM, name: str) -> tuple[float, float]:
            """Tokens a second over all streams, and seconds of a step in which all got a token."""
            begun = last_step(engine)
            rate = self._rate(engine, free, f"overlap {name}")
            return rate, decode_step_seconds(engine, self.num_streams, since_step=begun + 1)

        rates, steps = self._compare(turn, on, off)
        accounts = [self._account(engine) for engine in (on, off)]
        saved = [base - tried for tried, base in zip(steps.tried, steps.base, strict=True)]
        hidden = median(saved) / accounts[1]["host_seconds"]
        rows = [
            Compared("all streams, tok/s", rates, at_least=LEAST_OVERLAP),
            Compared("step, ms", steps, 1e3),
        ]
        title = f"{self.num_streams} streams of {self.num_tokens} tokens, {self.num_pairs} pairs"
        table = pairs_table(title, "overlap", "no overlap", rows)
        idle = verdict(accounts[0]["device_idle_share"], "{:.0%}", at_most=MOST_IDLE)
        shares = [[f"{each[name]:.1%}" for each in accounts] for name in IDLE_SHARES]
        host = [number(each["host_seconds"] * 1e3) for each in accounts]
        table.rows.extend(
            [
                ("device idle", *shares[0], "", "", idle),
                ("with prompts and joins", *shares[1], "", "", ""),
                ("host work, ms a step", *host, "", "", ""),
                ("of it no longer in the step", f"{hidden:.0%}", "", "", "", ""),
            ]
        )
        return table, {
            "tokens_per_second": rates.as_dict(),
            "step_seconds": steps.as_dict(),
            "hidden_share": hidden,
            "overlap": accounts[0],
            "no_overlap": accounts[1],
        }

    def grammar(self) -> Part:
        if self.num_streams < 2:
            raise BenchError(f"--streams must be at least 2 for grammar, got {self.num_streams}")
        free = self._params()
        constrained = replace(free, json_schema=ENDLESS)
        half = [free if number % 2 else constrained for number in range(self.num_streams)]
        (rates,) = self._compare(
            lambda params, name: (self._rate(self.llm, params, f"grammar {name}"),),
            half,
            [free] * self.num_streams,
        )
        title = f"{self.num_streams} streams, half of them constrained and none"
        row = Compared("all streams, tok/s", rates, at_least=LEAST_CONSTRAINED)
        return pairs_table(title, "half", "none", [row]), rates.as_dict()

    def forced_chunks(self) -> Part:
        params = SamplingParams(max_tokens=512, temperature=0.0, json_schema=FORM)
        chunks, tokens = engine_beside(self.llm), engine_beside(self.llm, forced_chunks=False)

        def turn(engine: LLM, name: str) -> tuple[float]:
            return (1 / timed(engine, self._texts(1, f"form {name}"), [params]),)

        (rates,) = self._compare(turn, chunks, tokens)
        metrics = chunks.metrics
        forms = metrics.requests_finished
        length, forced = metrics.generated_tokens // forms, metrics.forced_tokens // forms
        title = f"Forms of {length} tokens, {forced} of them forced"
        row = Compared("forms a second, alone", rates, at_least=LEAST_FORCED)
        data = {**rates.as_dict(), "form_tokens": length, "forced_tokens": forced}
        return pairs_table(title, "in chunks", "one by one", [row]), data

    def prefix_cache(self) -> Part:
        cached, uncached = (
            engine_beside(self.llm, prefix_cache=wanted) for wanted in (True, False)
        )
        params = replace(self._params(), max_tokens=NEW_REPLY_TOKENS)

        def turn(engine: LLM, name: str) -> tuple[float, float]:
            """Seconds to the first token, and until the request is removed from the engine."""
            text = prompts_for(engine, f"cost {name}").text(self.prompt_tokens)
            begun = last_step(engine)
            total = timed(engine, [text], [params])
            return first_token_seconds(engine, since_step=begun + 1), total

        ttft, total = self._compare(turn, cached, uncached)
        if cached.metrics.cached_tokens >= GRID:
            raise BenchError(f"{cached.metrics.cached_tokens:,} tokens of new prompts were cached")
        title = f"{self.num_pairs} pairs of new {self.prompt_tokens:,}-token prompts"
        rows = [
            Compared("time to first token, ms", ttft, 1e3, at_most=MOST_CACHE),
            Compared("until the request is removed, ms", total, 1e3),
        ]
        data = {"ttft": ttft.as_dict(), "total": total.as_dict()}
        return pairs_table(title, "cache", "no cache", rows), data

    def _compare(
        self, turn: Callable[[Way, str], tuple[float, ...]], tried: Way, base: Way
    ) -> list[Pairs]:
        """One `Pairs` for each number that a turn gives."""
        ways = in_turn(
            self.num_pairs, lambda name: turn(tried, name), lambda name: turn(base, name)
        )
        columns = [list(zip(*numbers, strict=True)) for numbers in ways]
        return [Pairs(list(a), list(b)) for a, b in zip(*columns, strict=True)]

    def _params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)

    def _rate(self, engine: LLM, params: Sequence[SamplingParams], seed: str) -> float:
        """Tokens a second over all streams, from their prompts to their last tokens."""
        seconds = timed(engine, self._texts(self.num_streams, seed), params)
        return self.num_streams * self.num_tokens / seconds

    def _texts(self, count: int, seed: str) -> list[str]:
        prompts = prompts_for(self.llm, seed)
        return [prompts.text(PROMPT_TOKENS) for _ in range(count)]

    def _account(self, engine: LLM) -> dict[str, float]:
        """From the engine's records of its last steps."""
        return {
            "device_idle_share": decode_idle_share(engine, self.num_streams),
            "whole_idle_share": engine.metrics.device_idle_share,
            "host_seconds": host_step_seconds(engine, self.num_streams),
        }


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
    engine = without_usual_drafts(config.engine)
    with LLM(config=replace(config, engine=engine)) as llm:
        bench = FeatureBench(llm, streams, output, pairs)
        parts = {
            "overlap": bench.overlap,
            "grammar": bench.grammar,
            "forced-chunks": bench.forced_chunks,
            "prefix-cache": bench.prefix_cache,
        }
        return report_parts("features", parts, only or ())


if __name__ == "__main__":
    run(features, "model", "engine", without=("prefix_cache", "overlap", "forced_chunks"))
