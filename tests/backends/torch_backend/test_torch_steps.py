"""The backend on its kernels: whole steps, on a GPU captured and replayed, else interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("interpreted")


from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan, StepResult
from pippin.backends.torch.backend import TorchBackend
from pippin.types import SamplingParams
from torch_serving import load_torch

PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.02, "frequency_penalty": 0.5},  # takes the sampler
)


def play(backend: TorchBackend, params: dict[str, Any], num_steps: int) -> list[StepResult]:
    """Two rows of different lengths, launched two steps ahead; then one of them alone."""
    prompts = {slot: np.arange(5, 5 + 3 * slot, dtype=np.int32) for slot in (1, 2)}
    admits = tuple(
        Admit(slot, SamplingParams(**params), (), prompt, seed=slot)
        for slot, prompt in prompts.items()
    )
    chunks = tuple(PrefillRow(slot, 0, prompt, samples=True) for slot, prompt in prompts.items())
    pending = [backend.launch(StepPlan(0, admit=admits, prefill=chunks))]
    for number in range(num_steps):
        slots = (2, 1) if number < num_steps - 1 else (2,)
        rows = tuple(DecodeRow(slot, 3 * slot + number) for slot in slots)
        pending.append(backend.launch(StepPlan(number + 1, decode=rows)))
    end = StepPlan(num_steps + 1, retire=(Retire(1), Retire(2)))
    return [step.wait() for step in (*pending, backend.launch(end))]


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "drawn", "sampler"])
def test_steps_of_kernels_say_what_plain_steps_say(params: dict[str, Any]) -> None:
    loaded = load_torch("qwen3_5")
    plain, kernels = (
        TorchBackend(loaded, num_slots=2, kernels=kernels, debug=True) for kernels in (False, True)
    )
    expected = [dict(result.tokens) for result in play(plain, params, 3)]
    found = [dict(result.tokens) for result in play(kernels, params, 3)]
    assert found == expected
    assert [len(tokens) for tokens in found] == [2, 2, 2, 1, 0]
