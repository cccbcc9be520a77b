"""The same replies with and without drafts, in turn, by engines that share a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from zlib import crc32

from pippin import LLM, SamplingParams
from pippin.bench.report import BenchError, Report, busy_note, say
from pippin.bench.serve import Count, Numbers
from pippin.config import Config
from pippin.offline.llm import Completion
from pippin.scheduler.request import Request

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from oracle_drafter import OracleDrafter
from shared import Names, engine_beside, greedy, in_turn, pairs_table, prompts_for, run

PROMPT_TOKENS = 24
LEAST = 0.97  # times the throughput without drafts, whatever is drafted
LEAST_EDITS = 3.0  # of one row whose reply is a text that it has, with one word changed
SHARES = (0.0, 0.5, 0.8, 1.0)  # of places at which an oracle is right
SHORTEST = 0.5  # of the longest reply of a batch
PARTS = ("oracle", "edits", "new", "mtp", "draft")
Measured = tuple[tuple[str, ...], dict[str, Any]]  # a row of the table, and its numbers


@dataclass(frozen=True)
class Work:
    """What the rows of a batch are to generate."""

    prompts: Sequence[str]
    params: Sequence[SamplingParams]
    predictions: Sequence[Sequence[int]] | None = None

    def generate(self, llm: LLM) -> list[Completion]:
        return llm.generate(self.prompts, self.params, predictions=self.predictions)

    def rate(self, llm: LLM) -> float:
        """Tokens a second over all rows."""
        began = perf_counter()
        self.generate(llm)
        return sum(params.max_tokens for params in self.params) / (perf_counter() - began)


@dataclass(frozen=True)
class SpeculateBench:
    llm: LLM
    num_tokens: int  # of the longest reply
    num_pairs: int

    def measure(self, part: str, num_rows: int) -> list[Measured]:
        if part == "oracle":
            return [self._oracle(num_rows, share) for share in SHARES]
        if part == "edits":
            return [self._edits(num_rows)]
        if part == "new":
            return [self._new(num_rows)]
        ways = self._engines(part, prefix_cache=False)
        return [self._compare(part, num_rows, ways, lambda pair: self._work(num_rows, pair))]

    def _oracle(self, num_rows: int, share: float) -> Measured:
        with_drafts, without = self._engines("suffix", prefix_cache=False)
        work = self._work(num_rows, "oracle")
        replies = {tuple(c.prompt_tokens): c.tokens for c in work.generate(without)}

        def reply_of(request: Request) -> Sequence[int]:
            return replies[tuple(request.prompt.tolist())]

        speculation = with_drafts.loop.scheduler.speculation
        assert speculation is not None
        vocab_size = self.llm.loop.backend.spec.vocab_size
        speculation.drafter = OracleDrafter(reply_of, share, vocab_size)
        with_drafts.metrics.drafters.update(speculation.no_counts)
        name = f"oracle, {share:.0%} right"
        return self._compare(name, num_rows, (with_drafts, without), lambda _: work)

    def _edits(self, num_rows: int) -> Measured:
        ways = self._engines("suffix", prefix_cache=False)
        work = self._work(num_rows, "edits")
        vocab_size = self.llm.loop.backend.spec.vocab_size
        texts = [one_changed(c.tokens, vocab_size) for c in work.generate(ways[1])]
        work = replace(work, predictions=texts)
        least = LEAST_EDITS if num_rows == 1 else LEAST
        return self._compare("edits", num_rows, ways, lambda _: work, least)

    def _new(self, num_rows: int) -> Measured:
        def work(pair: str) -> Work:
            work = self._work(num_rows, f"new {pair}")
            sampled = [
                replace(params, temperature=1.0, seed=crc32(f"{pair} {row}".encode()))
                for row, params in enumerate(work.params)
            ]
            return replace(work, params=sampled)

        ways = self._engines("suffix", prefix_cache=True)
        return self._compare("new stories", num_rows, ways, work)

    def _engines(self, speculate: str, *, prefix_cache: bool) -> tuple[LLM, LLM]:
        """With drafts, and without."""
        with_drafts, without = (
            engine_beside(self.llm, speculate=way, prefix_cache=prefix_cache)  # type: ignore[arg-type]
            for way in (speculate, "off")
        )
        return with_drafts, without

    def _work(self, num_rows: int, seed: str) -> Work:
        prompts = prompts_for(self.llm, f"{seed}, {num_rows} rows")
        shorter = [(num_rows - row) / num_rows for row in range(num_rows)]
        lengths = [int(self.num_tokens * (SHORTEST + (1 - SHORTEST) * part)) for part in shorter]
        texts = [prompts.text(PROMPT_TOKENS) for _ in range(num_rows)]
        return Work(texts, [greedy(length) for length in lengths])

    def _compare(
        self,
        name: str,
        num_rows: int,
        ways: tuple[LLM, LLM],
        work: Callable[[str], Work],
        least: float = LEAST,
    ) -> Measured:
        with_drafts, without = ways
        pairs = in_turn(
            self.num_pairs,
            lambda pair: work(pair).rate(with_drafts),
            lambda pair: work(pair).rate(without),
        )
        drafted = with_drafts.metrics.drafted_tokens
        share = with_drafts.metrics.accepted_tokens / drafted if drafted else None
        facts = {"accepted": share, "drafted": drafted}
        row = pairs.row(f"{name}, {num_rows} rows, tok/s", at_least=least)
        return row, {**pairs.as_dict(), "rows": num_rows, **facts}


def one_changed(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """A text with another word in its middle."""
    middle = len(tokens) // 2
    return [*tokens[:middle], (tokens[middle] + 1) % vocab_size, *tokens[middle + 1 :]]


def speculate(
    config: Config,
    *,
    only: Names = None,
    rows: Numbers = None,
    output: Count = 128,
    pairs: Count = 5,
) -> Report:
    """Measure what drafts gain and cost: the same replies with and without them, in turn.

    oracle: drafts that are right at 0, 50, 80 and 100% of places. edits: each request predicts its
    reply, with one word changed. new: sampled stories. mtp: greedy stories with the MTP head of the
    checkpoint, where it has one. draft: the same with the draft model, where one is given.

    Parameters
    ----------
    only
        Parts to run: oracle, edits, new, mtp, draft. Default: all.
    rows
        Batch sizes to measure. Default: 1,4,8,32.
    output
        Length of the longest reply of a batch, in tokens; the shortest has half of it.
    pairs
        Number of pairs of runs, one with drafts and one without; ratios are computed within a pair.
    """
    if unknown := [part for part in only or () if part not in PARTS]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    notes = busy_note()
    table: list[tuple[str, ...]] = []
    data: dict[str, list[Any]] = {}
    with LLM(config=replace(config, engine=replace(config.engine, speculate="auto"))) as llm:
        if llm.loop.scheduler.speculation is None:
            raise BenchError("this backend verifies no drafts for this model")
        by_backend = "mtp" if llm.config.engine.draft_model is None else "draft"
        drafters = [by_backend] if llm.loop.backend.drafts_itself else []
        possible = ["oracle", "edits", "new", *drafters]
        bench = SpeculateBench(llm, output, pairs)
        for num_rows in rows or (1, 4, 8, 32):
            for part in (part for part in only or PARTS if part in possible):
                say(f"measuring: {part}, {num_rows} rows")
                for row, facts in bench.measure(part, num_rows):
                    table.append(row)
                    data.setdefault(part, []).append(facts)
    title = f"Replies of up to {output} tokens, {pairs} pairs of engines in turn"
    return Report("speculate", [pairs_table(title, "drafts", "none", table)], data, notes)


if __name__ == "__main__":
    run(speculate, "model", "engine", without=("prefix_cache", "speculate"))
