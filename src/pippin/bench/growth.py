"""`pippin bench growth`: how a step's time grows with batch, context, skew, tree and requests.

Knows only the offline API. The tree and the number of requests are measured on the toy backend,
whose model costs next to nothing: what is left is the host's own work.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

from pippin import LLM
from pippin.bench.plot import Lines
from pippin.bench.report import Report, Table, busy_note, number, say
from pippin.bench.samples import median
from pippin.bench.steps import decode_step_seconds, generate, last_step, prompts_for
from pippin.bench.wire import BenchError
from pippin.config import Config, EngineConfig, ModelConfig

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
SHORT_CONTEXT = 100
SKEWED_ROWS = 16  # one long among these
STEPS = 64  # decoded together, at least
TREE_TOKENS = (10_000, 100_000, 1_000_000)
REQUESTS = (1, 4, 16, 64, 256)
TOY_PROMPT = 4000
TOY_SHORT = 16
TOY_VOCAB = 1000

DECODE_PARTS = ("batch", "context", "skew")
PARTS = (*DECODE_PARTS, "tree", "requests")


@dataclass(frozen=True)
class Curve:
    """A time, or a ratio of times, over one growing thing."""

    name: str
    title: str
    x_label: str
    points: list[tuple[float, float]]
    unit: str = "ms"

    @property
    def table(self) -> Table:
        rows = [(f"{x:,.0f}", number(y)) for x, y in self.points]
        return Table(self.title, (self.x_label, self.unit), list(rows))

    @property
    def chart(self) -> Lines:
        return Lines(self.title, self.x_label, self.unit, {self.name: self.points}, log_x=True)


class DecodeGrowth:
    """Step times of a real model. Prompts are read once and then come from the prefix cache."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def batch(self) -> Curve:
        points = [(float(n), self._step_ms([SHORT_CONTEXT] * n)) for n in BATCHES]
        return Curve("batch", f"Decode step, {SHORT_CONTEXT}-token rows", "rows", points)

    def context(self) -> Curve:
        points = [(float(n), self._step_ms([n])) for n in self._contexts()]
        return Curve("context", "Decode step, one row", "tokens of context", points)

    def skew(self) -> Curve:
        """One long row among short ones, for each length, over the sum of its parts."""
        short = [SHORT_CONTEXT] * (SKEWED_ROWS - 1)
        short_ms = self._step_ms(short)
        points = []
        for length in self._contexts():
            parts_ms = self._step_ms([length]) + short_ms
            points.append((float(length), self._step_ms([length, *short]) / parts_ms))
        title = f"One long row among {len(short)} of {SHORT_CONTEXT} tokens, over the sum of parts"
        return Curve("skew", title, "tokens of the long row", points, unit="x")

    def _contexts(self) -> list[int]:
        """The longest leaves room for the tokens that are generated."""
        longest = self._llm.max_len - _num_generated(SKEWED_ROWS)
        return sorted({min(context, longest) for context in CONTEXTS})

    def _step_ms(self, contexts: Sequence[int]) -> float:
        say(f"decode: {len(contexts)} rows, the longest of {max(contexts):,} tokens")
        prompts = prompts_for(self._llm, "growth")
        texts = [prompts.text(length) for length in contexts]
        generate(self._llm, texts, max_tokens=1)
        begun = last_step(self._llm)
        generate(self._llm, texts, max_tokens=_num_generated(len(contexts)))
        return decode_step_seconds(self._llm, len(contexts), since_step=begun + 1) * 1e3


def _num_generated(num_rows: int) -> int:
    """Enough that all rows decode together for a while, though they start one after another."""
    return STEPS + 4 * num_rows


def tree(config: Config) -> Curve:
    """A known prompt's whole way through the host, with ever more in the tree."""
    source = random.Random("tree")
    points = []
    with LLM(config=_toy(config, max_running=8)) as llm:
        known = _toy_prompt(source)
        filled = 0
        for size in TREE_TOKENS:
            say(f"tree: {size:,} tokens")
            while filled < size:
                generate(llm, [_toy_prompt(source)], max_tokens=1)
                filled += TOY_PROMPT
            generate(llm, [known], max_tokens=1)
            seconds = [generate(llm, [known], max_tokens=1) for _ in range(9)]
            points.append((float(size), median(seconds) * 1e3))
    title = f"A known {TOY_PROMPT:,}-token prompt, host only"
    return Curve("tree", title, "tokens in the tree", points)


def requests(config: Config) -> Curve:
    """The host's work for one decode step: plan, launch and commit."""
    source = random.Random("requests")
    points = []
    with LLM(config=_toy(config, max_running=max(REQUESTS))) as llm:
        for count in REQUESTS:
            say(f"requests: {count}")
            prompts = [_toy_prompt(source)[:TOY_SHORT] for _ in range(count)]
            generate(llm, prompts, max_tokens=_num_generated(count))
            seconds = [
                (record.launched - record.planned) + (record.committed - record.device_done)
                for record in llm.metrics.records
                if record.decode_rows == count and record.prefill_tokens == 0
            ]
            points.append((float(count), median(seconds) * 1e3))
    return Curve("requests", "Host work for one decode step", "running requests", points)


def growth(config: Config, *, only: Sequence[str] = ()) -> Report:
    if unknown := [name for name in only if name not in PARTS]:
        raise BenchError(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    chosen = [name for name in PARTS if name in only] if only else list(PARTS)
    notes = busy_note()
    curves: list[Curve] = []
    if any(name in DECODE_PARTS for name in chosen):
        engine = dataclasses.replace(
            config.engine, max_running=max(config.engine.max_running, *BATCHES)
        )
        with LLM(config=dataclasses.replace(config, engine=engine)) as llm:
            decode = DecodeGrowth(llm)
            curves += [getattr(decode, name)() for name in chosen if name in DECODE_PARTS]
    if "tree" in chosen:
        curves.append(tree(config))
    if "requests" in chosen:
        curves.append(requests(config))
    return Report(
        name="growth",
        tables=[curve.table for curve in curves],
        charts=[curve.chart for curve in curves],
        data={curve.name: curve.points for curve in curves},
        notes=notes,
    )


def _toy(config: Config, max_running: int) -> Config:
    engine = EngineConfig(max_running=max_running, prefill_tokens=TOY_PROMPT)
    model = ModelConfig(model=config.model.model, backend="fake")
    return dataclasses.replace(config, model=model, engine=engine)


def _toy_prompt(source: random.Random) -> list[int]:
    return [source.randrange(TOY_VOCAB) for _ in range(TOY_PROMPT)]
