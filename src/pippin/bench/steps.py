"""Times prefill and decode steps of a loaded model, through the offline API alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from pippin import LLM, SamplingParams
from pippin.bench.prompts import Prompts
from pippin.bench.samples import median
from pippin.bench.wire import BenchError

FEWEST_STEPS = 8


def prompts_for(llm: LLM, seed: str) -> Prompts:
    """Prompts of an exact length for this model."""
    return Prompts(seed, lambda text: len(llm.text.tokenizer.encode(text)))


def generate(llm: LLM, prompts: Sequence[Sequence[int] | str], max_tokens: int) -> float:
    """Seconds to complete all prompts at once, each to exactly `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def decode_step_seconds(llm: LLM, num_rows: int, since_step: int = 0) -> float:
    """The median over the steps that decoded exactly `num_rows` rows and did nothing else.

    A step's time is from the end of the one before it to its own.
    """
    seconds = [
        after.device_done - before.device_done
        for before, after in itertools.pairwise(llm.metrics.records)
        if after.step == before.step + 1 and after.step >= since_step
        if all(r.prefill_tokens == 0 and r.decode_rows == num_rows for r in (before, after))
    ]
    if len(seconds) < FEWEST_STEPS:
        raise BenchError(
            f"only {len(seconds)} steps decoded {num_rows} rows together, "
            f"{FEWEST_STEPS} are needed: generate more tokens"
        )
    return median(seconds)


def last_step(llm: LLM) -> int:
    """The number of the newest step; 0 before the first."""
    return llm.metrics.records[-1].step if llm.metrics.records else 0
