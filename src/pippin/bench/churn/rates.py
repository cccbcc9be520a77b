"""What work costs when nothing is in its way: the rates of one batch. Knows only the offline API.

A served load is judged by these, measured in the same run on the same model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pippin import LLM
from pippin.bench.one_batch import time_batch
from pippin.bench.report import say
from pippin.bench.samples import median
from pippin.bench.steps import (
    first_token_seconds,
    forward_seconds,
    generate,
    last_step,
    make_ready,
    prompts_for,
)
from pippin.config import Config
from pippin.metrics import StepLog, StepRecord, read_step_log

CONTEXT = 512  # tokens of each row: about what requests under churn hold
DECODE_TOKENS = 64
CHUNKS = (24, 56, 120, 248, 504)  # tokens: lengths that no batch here has
REPEATS = 2

Points = tuple[tuple[int, float], ...]  # of a curve, by ascending x


@dataclass(frozen=True)
class Rates:
    """Seconds. Between measured points they are interpolated."""

    decode_steps: Points  # rows -> a step of a settled batch
    chunks: Points  # tokens -> a forward over one prompt, its shape not new
    prefill_tokens_per_second: float  # of the best batch
    new_prefill: float = 0.0  # what a forward over prompts takes longer the first time
    new_decode: float = 0.0  # what a step over rows does

    def decode_seconds(self, num_rows: int) -> float:
        return _on_curve(self.decode_steps, num_rows) if num_rows else 0.0

    def prefill_seconds(self, num_tokens: float) -> float:
        return num_tokens / self.prefill_tokens_per_second

    def chunk_seconds(self, num_tokens: int, num_forwards: int) -> float:
        """So many tokens in so many forwards, each by itself."""
        if not num_forwards:
            return 0.0
        each = num_tokens / num_forwards
        largest, _ = self.chunks[-1]
        seconds = _on_curve(self.chunks, each) + self.prefill_seconds(max(0, each - largest))
        return num_forwards * seconds

    def __str__(self) -> str:
        steps = ", ".join(f"{seconds * 1e3:.3g} ms at {n}" for n, seconds in self.decode_steps)
        chunks = ", ".join(f"{seconds * 1e3:.3g} ms of {n}" for n, seconds in self.chunks)
        return (
            f"One batch, in the same run: prefill {self.prefill_tokens_per_second:,.0f} tok/s; "
            f"decode steps of {steps} rows; forwards of {chunks} prompt tokens alone. A new "
            f"shape costs {self.new_prefill * 1e3:.3g} ms in prefill, "
            f"{self.new_decode * 1e3:.3g} ms in decode."
        )


@dataclass(frozen=True)
class LonePrompt:
    """A prompt in a forward by itself."""

    num_tokens: int
    seconds: float  # from its dispatch to its token, when its length is not new any more
    extra: float  # seconds that the first of its length took longer, building the graph included


def widths_to_measure(decode_rows: Iterable[int]) -> list[int]:
    """A few widths that cover all those that steps had: 1, 2, 4, ... and the widest."""
    widest = max(decode_rows, default=1) or 1
    return [n for n in (2**k for k in range(widest.bit_length())) if n < widest] + [widest]


def measure_rates(config: Config, widths: Sequence[int]) -> Rates:
    max_running = max(config.engine.max_running, *widths)
    engine = replace(config.engine, prefix_cache=False, max_running=max_running)
    with TemporaryDirectory() as folder, LLM(config=replace(config, engine=engine)) as llm:
        make_ready(llm)
        log = llm.metrics.log = StepLog(Path(folder) / "steps")
        timings = []
        for width in widths:
            say(f"one batch of {width}")
            timings.append(time_batch(llm, width, CONTEXT, DECODE_TOKENS, REPEATS))
        say("prompts by themselves")
        lone = [_lone_prompt(llm, length) for length in CHUNKS]
        log.close()
        records = read_step_log(Path(folder) / "steps")
    decode_steps = {timing.batch: timing.decode_seconds for timing in timings}
    return Rates(
        decode_steps=tuple(decode_steps.items()),
        chunks=tuple((prompt.num_tokens, prompt.seconds) for prompt in lone),
        prefill_tokens_per_second=max(timing.prefill_tokens_per_second for timing in timings),
        new_prefill=max(0.0, median([prompt.extra for prompt in lone])),
        new_decode=max(0.0, median(_extra_of_new_steps(records, decode_steps))),
    )


def _lone_prompt(llm: LLM, num_tokens: int) -> LonePrompt:
    whole, forward = [], []
    for turn in range(1 + REPEATS):
        begun = last_step(llm)
        text = prompts_for(llm, f"lone {num_tokens} {turn}").text(num_tokens)
        generate(llm, [text], max_tokens=1)
        whole.append(first_token_seconds(llm, since_step=begun + 1))
        forward.append(forward_seconds(llm, since_step=begun + 1))
    return LonePrompt(num_tokens, median(forward[1:]), whole[0] - median(whole[1:]))


def _extra_of_new_steps(records: Iterable[StepRecord], settled: Mapping[int, float]) -> list[float]:
    """What decode steps of a new shape took longer than settled ones of as many rows."""
    return [
        after.resumed - before.resumed - settled[after.decode_rows]
        for before, after in itertools.pairwise(records)
        if after.decode_rows in settled and not after.prefill_tokens and after.forwards.new_decode
        if after.step == before.step + 1 and not after.after_pause
    ] or [0.0]


def _on_curve(points: Points, x: float) -> float:
    xs, ys = zip(*points, strict=True)
    return float(np.interp(x, xs, ys))
