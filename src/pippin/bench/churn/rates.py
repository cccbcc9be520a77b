"""What work costs when nothing is in its way: the rates of one batch. Knows only the offline API.

A served load is judged by these, measured in the same run on the same model. Of repeated
measurements the fastest counts: others met something that was in the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from pippin import LLM
from pippin.bench.in_process.one_batch import time_batch
from pippin.bench.in_process.steps import (
    first_token_seconds,
    generate,
    last_step,
    prompts_for,
)
from pippin.bench.results.report import say
from pippin.bench.results.samples import median
from pippin.config import Config
from pippin.metrics import StepLog, StepRecord, read_step_log

CONTEXT = 512  # tokens of each row: about what requests under churn hold
DECODE_TOKENS = 64
CHUNKS = (24, 56, 120, 248, 504)  # tokens
NEW_LENGTHS = (19, 23, 27, 31, 35, 39, 43, 47, 51)  # tokens: few, so that times are precise
REPEATS = 2

Points = tuple[tuple[int, float], ...]  # of a curve, by ascending x


@dataclass(frozen=True)
class Rates:
    """Seconds. Between measured points they are interpolated."""

    decode_steps: Points  # rows -> a step of a settled batch
    chunks: Points  # tokens -> the device's time for a forward over one prompt
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


def widths_to_measure(decode_rows: Iterable[int]) -> list[int]:
    """A few widths that cover all those that steps had: 1, 2, 4, ... and the widest."""
    widest = max(decode_rows, default=1) or 1
    return [n for n in (2**k for k in range(widest.bit_length())) if n < widest] + [widest]


def measure_rates(config: Config, widths: Sequence[int]) -> Rates:
    engine = replace(
        config.engine.without_usual_drafts().with_rows(max(widths)), prefix_cache=False
    )
    with TemporaryDirectory() as folder, LLM(config=replace(config, engine=engine)) as llm:
        log = llm.metrics.log = StepLog(Path(folder) / "steps")
        timings = []
        for width in widths:
            say(f"one batch of {width}")
            timings.append(time_batch(llm, width, CONTEXT, DECODE_TOKENS, REPEATS, choose=min))
        say("prompts by themselves")
        new_lengths = [_extra_of_new_length(llm, length) for length in NEW_LENGTHS]
        chunks = [(length, _forward_seconds(llm, length)) for length in CHUNKS]
        log.close()
        records = read_step_log(Path(folder) / "steps")
    decode_steps = {timing.batch: timing.decode_seconds for timing in timings}
    return Rates(
        decode_steps=tuple(decode_steps.items()),
        chunks=tuple(chunks),
        prefill_tokens_per_second=max(timing.prefill_tokens_per_second for timing in timings),
        new_prefill=max(0.0, median(new_lengths)),
        new_decode=max(0.0, median(_extra_of_new_steps(records, decode_steps))),
    )


def _forward_seconds(llm: LLM, num_tokens: int) -> float:
    """The device's time for a prompt by itself, of a length that is not new any more."""
    times = []
    for turn in range(1 + REPEATS):
        before = llm.metrics.records[-1]
        _ask(llm, num_tokens, turn)
        last = [record for record in llm.metrics.records if record.prefill_tokens][-1]
        if before.device is not None and last.device is not None:
            times.append(last.device.busy - before.device.busy)
        else:  # what launching does not hide
            times.append(last.resumed - last.launched)
    return min(times[1:])


def _extra_of_new_length(llm: LLM, num_tokens: int) -> float:
    """What the first prompt of a length takes longer than the next ones."""
    first, *later = (_ask(llm, num_tokens, turn) for turn in range(1 + REPEATS))
    return first - median(later)


def _ask(llm: LLM, num_tokens: int, turn: int) -> float:
    """Seconds from a lone prompt's plan to its token."""
    begun = last_step(llm)
    text = prompts_for(llm, f"lone {num_tokens} {turn}").text(num_tokens)
    generate(llm, [text], max_tokens=1)
    return first_token_seconds(llm, since_step=begun + 1)


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
