"""Fingerprints that a step launches together: each payload is given the sums of its own words."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.base import Admit, PrefillRow, Retire, StepPlan
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.types import Payload, SamplingParams
from torch_serving import load_torch

GREEDY = SamplingParams(temperature=0.0)
KERNEL_BYTES = 16  # where tensors begin that no kernel is compiled again for


def sum_words(memory: torch.Tensor, starts: torch.Tensor, num_words: int) -> torch.Tensor:
    """As the kernel does it."""
    assert starts.data_ptr() % KERNEL_BYTES == 0
    return torch.stack([memory[start : start + num_words].sum() for start in starts.tolist()])


def words_of(backend: TorchBackend, payload: Payload) -> list[int]:
    pools = backend.runner.pools
    if isinstance(payload, HiddenPayload):
        assert payload.hidden is not None
        lines = payload.hidden.view(1, -1)
    elif isinstance(payload, StatePayload):
        lines = pools.state_bytes(payload.slab).view(1, -1)
    else:
        assert isinstance(payload, KVPayload)
        lines = pools.cell_bytes(payload.kind, payload.cells)
    return lines.contiguous().view(torch.int32).sum(dim=1).tolist()


@pytest.mark.parametrize("by_kernel", [False, True], ids=["plain", "kernel"])
@pytest.mark.parametrize("lengths", [(65,), (64, 131, 7)], ids=str)
def test_every_payload_has_the_sums_of_its_words(lengths: tuple[int, ...], by_kernel: bool) -> None:
    backend = TorchBackend(load_torch("qwen3_5"), num_slots=4, kernels=False, fingerprints=True)
    if by_kernel:
        fingerprints = backend.runner.fingerprints
        assert fingerprints is not None
        fingerprints._sum_words = sum_words
    prompts = {
        slot: np.arange(10, 10 + n, dtype=np.int32) for slot, n in enumerate(lengths, start=1)
    }
    admit = tuple(Admit(slot, GREEDY, (), prompt, seed=1) for slot, prompt in prompts.items())
    rows = tuple(
        PrefillRow(
            slot, 0, prompt, samples=True, captures=True, checkpoints=(*range(64, len(prompt), 64),)
        )
        for slot, prompt in prompts.items()
    )
    result = backend.launch(StepPlan(1, admit=admit, prefill=rows)).wait()
    backend.launch(StepPlan(2, retire=tuple(Retire(slot) for slot in prompts))).wait()
    made = [payload for capture in result.captures for payload in capture.payloads]
    assert len(made) == 2 * len(lengths) + sum((n - 1) // 64 for n in lengths)
    for payload in made:
        assert isinstance(payload, KVPayload | StatePayload | HiddenPayload)
        assert payload.prints is not None
        assert payload.prints.tolist() == words_of(backend, payload)
    backend.close()
