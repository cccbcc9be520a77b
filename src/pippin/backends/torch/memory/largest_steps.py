"""The largest steps there can be, tried before requests run, so that their memory is known.

A chunk of as many tokens as a step takes, scored and sampled; and the sampler with every stage for
all slots. Knows no budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch

from pippin.backends.base import Admit, PrefillRow, Retire, StepPlan
from pippin.backends.masks import WORD_BITS
from pippin.backends.sampling.rules import SHORT
from pippin.backends.sampling.sampler import MAX_TOP_LOGPROBS, SampleRow
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.types import SamplingParams

FIRST_STEP = -(1 << 41)  # before those of any request, and of any that warms up
HUNGRY = SamplingParams(
    temperature=1.0,
    top_k=SHORT + 1,  # sorts the vocabulary
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=MAX_TOP_LOGPROBS,
)
SCORED = SamplingParams(temperature=1.0, prompt_logprobs=MAX_TOP_LOGPROBS)


def largest_chunk(prefill_tokens: int, max_len: int, num_slots: int) -> list[int]:
    """Tokens of each row of the largest chunk: as few rows as it takes."""
    longest = max(max_len - 1, 1)
    full, rest = divmod(prefill_tokens, longest)
    return ([longest] * full + [rest] * (rest > 0))[:num_slots]


def run_largest_chunk(launch: Callable[[StepPlan], TorchPending], lengths: list[int]) -> None:
    prompts = {slot: np.zeros(n, dtype=np.int32) for slot, n in enumerate(lengths, start=1)}
    steps: Iterator[int] = count(FIRST_STEP)
    admit = tuple(Admit(slot, SCORED, (), prompt, seed=1) for slot, prompt in prompts.items())
    rows = tuple(PrefillRow(slot, 0, prompt, samples=True) for slot, prompt in prompts.items())
    launch(StepPlan(next(steps), admit=admit, prefill=rows)).wait()
    launch(StepPlan(next(steps), retire=tuple(Retire(slot) for slot in prompts))).wait()


def run_largest_sampling(slots: Slots, num_slots: int, logits: torch.Tensor) -> None:
    """Of rows that wait for their masks; logits [vocab]: of any of them."""
    owners = range(1, num_slots + 1)
    prompt = np.zeros(1, dtype=np.int32)
    masks = np.full((num_slots, -(-len(logits) // WORD_BITS)), -1, dtype=np.int32)
    for params in (HUNGRY, replace(HUNGRY, top_k=0)):  # without a sort, too: kernels are compiled
        for slot in owners:
            slots.admit(Admit(slot, params, (), prompt, seed=slot))
        waiting = [logits.clone() for _ in owners]
        rows = [SampleRow(slot, 0) for slot in owners]
        slots.sampler.sample(torch.stack(waiting), rows, masks)
        for slot in owners:
            slots.retire(slot)
