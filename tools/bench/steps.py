"""Times prefill and decode steps of a loaded model, through the offline API alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from pippin import LLM, SamplingParams
from pippin.bench.report import BenchError, median
from prompts import Prompts

FEWEST_STEPS = 8


def prompts_for(llm: LLM, seed: str) -> Prompts:
    """Prompts of an exact length for this model."""
    return Prompts(seed, lambda text: len(llm.text.tokenizer.encode(text)))


def generate(llm: LLM, prompts: Sequence[Sequence[int] | str], max_tokens: int) -> float:
    """Seconds to complete all prompts at once, each to exactly `max_tokens`."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return timed(llm, prompts, [params] * len(prompts))


def timed(
    llm: LLM, prompts: Sequence[Sequence[int] | str], params: Sequence[SamplingParams]
) -> float:
    began = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - began


def decode_step_seconds(llm: LLM, num_rows: int, since_step: int = 0) -> float:
    """The median over the steps that decoded exactly `num_rows` rows and did nothing else.

    A step's time is from the end of the one before it to its own.
    """
    pairs = _decode_neighbours(llm, num_rows, since_step)
    return median([after.device_done - before.device_done for before, after in pairs])


def host_step_seconds(llm: LLM, num_rows: int, since_step: int = 0) -> float:
    """The host's own work in such a step, the median: plan, hand over, commit.

    What was spent waiting for the device does not count.
    """
    pairs = _decode_neighbours(llm, num_rows, since_step)
    return median([after.plan_seconds + before.commit_seconds for before, after in pairs])


def decode_idle_share(llm: LLM, num_rows: int) -> float:
    """The share of such steps in which the device had nothing to do."""
    spans = [after.idle_since(before) for before, after in _decode_neighbours(llm, num_rows, 0)]
    idle, whole = (float(sum(column)) for column in zip(*spans, strict=True))
    return max(0.0, idle) / whole


def _decode_neighbours(llm: LLM, num_rows: int, since_step: int) -> list[tuple[Any, Any]]:
    """Records of decode steps that followed each other without a pause."""
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(llm.metrics.records)
        if after.step == before.step + 1 and after.step >= since_step and not after.after_pause
        if all(r.prefill_tokens == 0 and r.decode_rows == num_rows for r in (before, after))
    ]
    if len(pairs) < FEWEST_STEPS:
        raise BenchError(
            f"only {len(pairs)} steps decoded {num_rows} rows together, "
            f"{FEWEST_STEPS} are needed: generate more tokens"
        )
    return pairs


def first_token_seconds(llm: LLM, since_step: int) -> float:
    """From the plan that let a lone prompt in, until its last chunk's token was handed out."""
    records = [r for r in llm.metrics.records if r.step >= since_step]
    prefills = [r for r in records if r.prefill_tokens] or records[:1]  # a known prompt needs none
    return prefills[-1].committed - prefills[0].planned


def admission_seconds(llm: LLM, since_step: int) -> float:
    """Planning the step that let a lone prompt in: match, lock, and what it has to compute."""
    first = next(r for r in llm.metrics.records if r.step >= since_step)
    return first.dispatched - first.planned


def last_step(llm: LLM) -> int:
    """The number of the newest step; -1 before the first."""
    return llm.metrics.records[-1].step if llm.metrics.records else -1
