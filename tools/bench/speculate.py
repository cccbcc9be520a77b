"""The same replies with and without drafts, in turn, by engines that share a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from zlib import crc32

from pippin import LLM, SamplingParams
from pippin.bench.report import BenchError, Report, busy_note, say
from pippin.bench.serve import Count, Numbers
from pippin.config import Config
from pippin.offline.llm import Completion
from pippin.scheduler.request import Request

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from oracle_drafter import OracleDrafter
from shared import Compared, Names, Pairs, engine_beside, in_turn, pairs_table, run
from steps import prompts_for

PROMPT_TOKENS = 24
LEAST = 0.97  # times the throughput without drafts, whatever is drafted
LEAST_EDITS = 3.0  # of one row whose reply is a text that it has, with one word changed
SHARES = (0.0, 0.5, 0.8, 1.0)  # of places at which an oracle is right
SHORTEST = 0.5  # of the longest reply of a batch
PARTS = ("oracle", "edits", "new", "mtp", "draft")


@dataclass(frozen=True)
class Work:
    """What the rows of a batch are to generate."""

    prompts: Sequence[str]
    params: Sequence[SamplingParams]
    predictions: Sequence[Sequence[int]] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(params.max_tokens for params in self.params)

    def rate(self, llm: LLM) -> float:
        """Tokens a second over all rows."""
        began = perf_counter()
        generate(llm, self)
        return self.num_tokens / (perf_counter() - began)


@dataclass(frozen=True)
class SpeculateBench:
    llm: LLM
    num_tokens: int  # of the longest reply
    num_pairs: int

    def oracle(self, num_rows: int, share: float) -> tuple[Compared, Any]:
        with_drafts, without = self._engines(prefix_cache=False)
        work = self._work(num_rows, "oracle")
        replies = {tuple(c.prompt_tokens): c.tokens for c in generate(without, work)}

        def reply_of(request: Request) -> Sequence[int]:
            return replies[tuple(request.prompt.tolist())]

        vocab_size = self.llm.loop.backend.spec.vocab_size
        speculation = with_drafts.loop.scheduler.speculation
        assert speculation is not None
        speculation.drafter = OracleDrafter(reply_of, share, vocab_size)
        with_drafts.metrics.drafters.update(speculation.no_counts)
        name = f"oracle, {share:.0%} right"
        return self._compare(name, num_rows, with_drafts, without, lambda _: work)

    def edits(self, num_rows: int) -> tuple[Compared, Any]:
        with_drafts, without = self._engines(prefix_cache=False)
        work = self._work(num_rows, "edits")
        vocab_size = self.llm.loop.backend.spec.vocab_size
        texts = [one_changed(c.tokens, vocab_size) for c in generate(without, work)]
        work = replace(work, predictions=texts)
        least = LEAST_EDITS if num_rows == 1 else LEAST
        return self._compare("edits", num_rows, with_drafts, without, lambda _: work, least)

    def new(self, num_rows: int) -> tuple[Compared, Any]:
        with_drafts, without = self._engines(prefix_cache=True)

        def work(name: str) -> Work:
            work = self._work(num_rows, f"new {name}")
            sampled = [
                replace(params, temperature=1.0, seed=crc32(f"{name} {row}".encode()))
                for row, params in enumerate(work.params)
            ]
            return replace(work, params=sampled)

        return self._compare("new stories", num_rows, with_drafts, without, work)

    @property
    def own_drafter(self) -> Literal["mtp", "draft"]:
        """What the backend drafts with itself, if it does."""
        return "mtp" if self.llm.config.engine.draft_model is None else "draft"

    def by_backend(self, num_rows: int) -> tuple[Compared, Any]:
        name = self.own_drafter
        with_drafts = engine_beside(self.llm, speculate=name, prefix_cache=False)
        without = engine_beside(self.llm, speculate="off", prefix_cache=False)
        return self._compare(
            name, num_rows, with_drafts, without, lambda pair: self._work(num_rows, pair)
        )

    def _engines(self, *, prefix_cache: bool) -> tuple[LLM, LLM]:
        """With drafts from texts, and without."""
        return (
            engine_beside(self.llm, speculate="suffix", prefix_cache=prefix_cache),
            engine_beside(self.llm, speculate="off", prefix_cache=prefix_cache),
        )

    def _work(self, num_rows: int, seed: str) -> Work:
        prompts = prompts_for(self.llm, f"{seed}, {num_rows} rows")
        shorter = [(num_rows - row) / num_rows for row in range(num_rows)]
        lengths = [int(self.num_tokens * (SHORTEST + (1 - SHORTEST) * part)) for part in shorter]
        greedy = SamplingParams(temperature=0.0, ignore_eos=True)
        return Work(
            [prompts.text(PROMPT_TOKENS) for _ in range(num_rows)],
            [replace(greedy, max_tokens=length) for length in lengths],
        )

    def _compare(
        self,
        name: str,
        num_rows: int,
        with_drafts: LLM,
        without: LLM,
        work: Callable[[str], Work],
        least: float = LEAST,
    ) -> tuple[Compared, Any]:
        turns = in_turn(
            self.num_pairs,
            lambda pair: work(pair).rate(with_drafts),
            lambda pair: work(pair).rate(without),
        )
        pairs, metrics = Pairs(*turns), with_drafts.metrics
        share = metrics.accepted_tokens / metrics.drafted_tokens if metrics.drafted_tokens else None
        row = Compared(f"{name}, {num_rows} rows, tok/s", pairs, at_least=least)
        facts = {"accepted": share, "drafted": metrics.drafted_tokens}
        return row, {**pairs.as_dict(), "rows": num_rows, **facts}


def generate(llm: LLM, work: Work) -> list[Completion]:
    return llm.generate(work.prompts, work.params, predictions=work.predictions)


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
    wanted = only or PARTS
    notes = busy_note()
    loaded = replace(config, engine=replace(config.engine, speculate="auto"))
    found: list[tuple[str, Compared, Any]] = []
    with LLM(config=loaded) as llm:
        if llm.loop.scheduler.speculation is None:
            raise BenchError("this backend verifies no drafts for this model")
        bench = SpeculateBench(llm, output, pairs)
        for num_rows in rows or (1, 4, 8, 32):
            if "oracle" in wanted:
                for share in SHARES:
                    say(f"measuring: oracle {share}, {num_rows} rows")
                    found.append(("oracle", *bench.oracle(num_rows, share)))
            if "edits" in wanted:
                say(f"measuring: edits, {num_rows} rows")
                found.append(("edits", *bench.edits(num_rows)))
            if "new" in wanted:
                say(f"measuring: new, {num_rows} rows")
                found.append(("new", *bench.new(num_rows)))
            own = bench.own_drafter
            if own in wanted and llm.loop.backend.drafts_itself:
                say(f"measuring: {own}, {num_rows} rows")
                found.append((own, *bench.by_backend(num_rows)))
    title = f"Replies of up to {output} tokens, {pairs} pairs of engines in turn"
    table = pairs_table(title, "drafts", "none", [row for _, row, _ in found])
    data: dict[str, list[Any]] = {part: [] for part, _, _ in found}
    for part, _, facts in found:
        data[part].append(facts)
    return Report("speculate", [table], data, notes)


if __name__ == "__main__":
    run(speculate, "model", "engine", without=("prefix_cache", "speculate"))
