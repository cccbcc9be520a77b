"""`pippin bench growth`: how a step's time grows with batch, context, skew, tree and requests.

Knows only the offline API. The tree and the number of requests are measured on the toy backend,
whose model costs next to nothing: what is left is the host's own work.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pippin import LLM
from pippin.bench.errors import BenchError
from pippin.bench.in_process.steps import (
    admission_seconds,
    decode_step_seconds,
    generate,
    host_step_seconds,
    last_step,
    make_ready,
    prompts_for,
)
from pippin.bench.results.plot import Goal, Lines
from pippin.bench.results.report import Report, Table, busy_note, number, say
from pippin.bench.results.samples import median
from pippin.config import Config, EngineConfig, ModelConfig

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
SKEWS = (1024, 8192)
SHORT_CONTEXT = 100
SKEWED_ROWS = 16  # one long among these
ROUNDS = 3
STEPS = 32  # decoded together, at least
TREE_TOKENS = (100_000, 200_000, 500_000, 1_000_000)
TREE_PROMPT = 100_000
TREE_REPEATS = 9
FILL_PROMPT = 4000
REQUESTS = (1, 4, 16, 64, 256)
TOY_SHORT = 16
TOY_VOCAB = 97

DECODE_PARTS = ("batch", "context", "skew")
PARTS = (*DECODE_PARTS, "tree", "requests")


@dataclass(frozen=True)
class Curve:
    """A time, or a ratio of times, over one growing thing; and what its last point may be."""

    name: str
    title: str
    x_label: str
    y_label: str
    points: list[tuple[float, float]]
    target: float | None = None

    @property
    def table(self) -> Table:
        rows: list[tuple[str, ...]] = [(f"{x:,.0f}", number(y)) for x, y in self.points]
        if self.target is None:
            return Table(self.title, (self.x_label, self.y_label), rows)
        verdict = "met" if self.points[-1][1] <= self.target else "missed"
        verdicts = [""] * (len(rows) - 1) + [f"at most {self.target:g}: {verdict}"]
        judged = [(*row, text) for row, text in zip(rows, verdicts, strict=True)]
        return Table(self.title, (self.x_label, self.y_label, "target"), judged)

    @property
    def chart(self) -> Lines:
        goal = Goal(self.target, f"target: at most {self.target:g}") if self.target else None
        curves = {"measured": self.points}
        return Lines(self.title, self.x_label, self.y_label, curves, log_x=True, target=goal)


class DecodeGrowth:
    """Step times of a real model. Prompts are read once and then come from the prefix cache."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._read: dict[tuple[int, ...], list[str]] = {}

    def batch(self) -> Curve:
        points = [(float(n), self._step_ms([SHORT_CONTEXT] * n)) for n in BATCHES]
        title = f"Decode step against batch, rows of {SHORT_CONTEXT} tokens"
        return Curve("batch", title, "rows in the batch", "ms a step", points)

    def context(self) -> Curve:
        points = [(float(n), self._step_ms([n])) for n in self._lengths(CONTEXTS)]
        title = "Decode step against context, one row"
        return Curve("context", title, "tokens of context", "ms a step", points)

    def skew(self) -> Curve:
        """One long row among short ones, over the long row alone plus the short ones alone."""
        short = [SHORT_CONTEXT] * (SKEWED_ROWS - 1)
        points = []
        for length in self._lengths(SKEWS):
            ratios = [
                self._step_ms([length, *short]) / (self._step_ms([length]) + self._step_ms(short))
                for _ in range(ROUNDS)
            ]
            points.append((float(length), median(ratios)))
        title = f"One long row among {len(short)} of {SHORT_CONTEXT} tokens, over its parts' sum"
        return Curve("skew", title, "tokens of the long row", "step / sum of parts", points, 1.3)

    def _lengths(self, wanted: Sequence[int]) -> list[int]:
        """The longest leaves room for the tokens that are generated."""
        longest = self._llm.max_len - _num_generated(SKEWED_ROWS)
        return sorted({min(length, longest) for length in wanted})

    def _step_ms(self, contexts: Sequence[int]) -> float:
        say(f"decode: {len(contexts)} rows, the longest of {max(contexts):,} tokens")
        texts = self._texts(tuple(contexts))
        begun = last_step(self._llm)
        generate(self._llm, texts, max_tokens=_num_generated(len(contexts)))
        return decode_step_seconds(self._llm, len(contexts), since_step=begun + 1) * 1e3

    def _texts(self, contexts: tuple[int, ...]) -> list[str]:
        """Prompts of these lengths, the same each time; read into the cache the first time."""
        if contexts not in self._read:
            prompts = prompts_for(self._llm, "growth")
            self._read[contexts] = [prompts.text(length) for length in contexts]
            generate(self._llm, self._read[contexts], max_tokens=1)
        return self._read[contexts]


def _num_generated(num_rows: int) -> int:
    """Enough that all rows decode together for a while, though they start one after another."""
    return STEPS + 2 * num_rows


def tree(config: Config) -> Curve:
    """Letting a known prompt in, with ever more in the tree."""
    source = random.Random("tree")
    points = []
    toy = _toy(config, max_running=1, prefill_tokens=TREE_PROMPT, max_len=2 * TREE_PROMPT)
    with LLM(config=toy) as llm:
        known = _toy_prompt(source, TREE_PROMPT)
        generate(llm, [known], max_tokens=1)
        filled = TREE_PROMPT
        for size in TREE_TOKENS:
            say(f"tree: {size:,} tokens")
            while filled < size:
                generate(llm, [_toy_prompt(source, FILL_PROMPT)], max_tokens=1)
                filled += FILL_PROMPT
            seconds = [_admit(llm, known) for _ in range(TREE_REPEATS)]
            points.append((float(size), median(seconds) * 1e3))
    title = f"Matching and planning a known {TREE_PROMPT:,}-token prompt"
    return Curve("tree", title, "tokens in the tree", "ms", points, target=5.0)


def _admit(llm: LLM, prompt: list[int]) -> float:
    begun = last_step(llm)
    cached = llm.metrics.cached_tokens
    generate(llm, [prompt], max_tokens=1)
    if llm.metrics.cached_tokens - cached < len(prompt) // 2:
        raise BenchError("the known prompt is no longer in the tree: give more --memory")
    return admission_seconds(llm, since_step=begun + 1)


def requests(config: Config) -> Curve:
    """The scheduler's work for one decode step."""
    source = random.Random("requests")
    points = []
    with LLM(config=_toy(config, max_running=max(REQUESTS))) as llm:
        for count in REQUESTS:
            say(f"requests: {count}")
            prompts = [_toy_prompt(source, TOY_SHORT) for _ in range(count)]
            generate(llm, prompts, max_tokens=_num_generated(count))
            points.append((float(count), host_step_seconds(llm, count) * 1e3))
    title = "Plan and commit of one decode step"
    return Curve("requests", title, "running requests", "ms a step", points, target=1.0)


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
            make_ready(llm)
            decode = DecodeGrowth(llm)
            curves += [getattr(decode, name)() for name in chosen if name in DECODE_PARTS]
    host_parts: dict[str, Callable[[], Curve]] = {
        "tree": partial(tree, config),
        "requests": partial(requests, config),
    }
    curves += [measure() for name, measure in host_parts.items() if name in chosen]
    return Report(
        name="growth",
        tables=[curve.table for curve in curves],
        charts=[curve.chart for curve in curves],
        data={curve.name: curve.points for curve in curves},
        notes=notes,
    )


def _toy(config: Config, *, max_len: int | None = None, **engine: int | bool) -> Config:
    model = ModelConfig(model=config.model.model, backend="fake", max_len=max_len)
    settings = EngineConfig(memory=config.engine.memory, **engine)  # type: ignore[arg-type]
    return dataclasses.replace(config, model=model, engine=settings)


def _toy_prompt(source: random.Random, num_tokens: int) -> list[int]:
    return [source.randrange(TOY_VOCAB) for _ in range(num_tokens)]
