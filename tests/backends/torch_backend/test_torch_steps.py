"""The backend on its kernels: whole steps, on a GPU captured and replayed, else interpreted.

On a CPU a stand-in for CUDA graphs runs again what it recorded, on the same tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan, StepResult
from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.graphs.steps import decode_steps
from pippin.backends.torch.kernels.draw import choose
from pippin.backends.torch.step.decode_inputs import (
    Choice,
    Inputs,
    RowArrays,
    SamplingColumns,
    pack_inputs,
)
from pippin.backends.torch.step.sizes import width_for
from pippin.types import SamplingParams
from run_again import RunAgain
from torch_serving import load_torch

VOCAB = 40
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


class Table:
    """Stands for a model's kernels: what follows a token at a position, looked up."""

    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        rows = torch.Generator().manual_seed(0)
        table = torch.randn(VOCAB, VOCAB, generator=rows)
        found = table[future[inputs.slot.long()].long()]
        return (found + inputs.position[:, None] * 0.01).to(future.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU steps are captured as it is")
def test_steps_that_are_replayed_say_what_steps_say() -> None:
    """Inputs go where a graph reads them, padding writes nothing, each width has its graphs."""
    columns = SamplingColumns(4, VOCAB)
    params = SamplingParams(temperature=0.8, top_k=7)
    for slot in range(1, 5):
        columns.admit(slot, SlotSampling(params, stop_ids=(), stream=slot))
    recorder = RunAgain()
    futures = [torch.arange(5, dtype=torch.int32) for _ in range(2)]
    plain, replayed = (
        decode_steps(Table(), choose, future, 9, found, logits=torch.empty(4, VOCAB))
        for future, found in zip(futures, (None, recorder), strict=True)
    )
    plays = [((1, 2, 3), Choice.DRAWN), ((4,), Choice.GREEDY), ((3, 1, 2), Choice.DRAWN)]
    plays += [((2, 4), Choice.LOGITS), ((1, 2, 3), Choice.GREEDY), ((4,), Choice.DRAWN)]
    for number, (slots, choice) in enumerate(plays):
        owners = np.array(slots)
        rows = RowArrays(owners, owners * 10 + number, *[owners] * 3)
        width = width_for(len(slots))
        words = pack_inputs(width, rows, waste_cell=9)
        columns.fill(words, owners, np.full(len(slots), number))
        replayed.prepare(width)
        expected, found = (steps.run(width, words, choice) for steps in (plain, replayed))
        real = slice(len(slots))  # what padding says, nobody reads
        if choice is Choice.LOGITS:
            assert found.logits is not None
            assert expected.logits is not None
            assert torch.equal(found.logits[real], expected.logits[real])
        said = slice(1, 2) if choice is Choice.LOGITS else slice(2)  # it leaves tokens to others
        assert torch.equal(found.drawn[said, real], expected.drawn[said, real])
        assert torch.equal(futures[1][1:], futures[0][1:])
    assert recorder.num_replays == len(plays)
    assert set(replayed.graphs) == {(width, choice) for width in (1, 2, 4) for choice in Choice}
