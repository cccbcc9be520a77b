"""top_p without a sort keeps the very tokens that a sort keeps: on a GPU, or interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.sampling.sampler import SampleRow
from pippin.backends.torch.device import find_device
from pippin.backends.torch.kernels import top_p
from pippin.backends.torch.kernels.draw import choose
from pippin.backends.torch.step import filters
from pippin.backends.torch.step.decode_inputs import (
    NO_ROWS,
    Choice,
    Inputs,
    SamplingColumns,
    pack_inputs,
)
from pippin.backends.torch.step.sampler import TorchSampler
from pippin.types import SamplingParams
from sampling_rule import KINDS, PARAMS, ROWS, logits

DEVICE = find_device()
TOP_P = [params for params in PARAMS if not params.top_k]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", TOP_P, ids=str)
def test_digits_keep_what_a_sort_keeps(
    params: SamplingParams, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks, the last one not full."""
    monkeypatch.setattr(top_p, "BLOCK", 512)
    x = torch.from_numpy(logits(kind)[:2]).to(DEVICE)
    columns = [torch.full((2,), value, device=DEVICE) for value in (params.top_p, params.min_p)]
    found, expected = (form.least_in_top_p(x, *columns) for form in (top_p, filters))
    assert torch.equal(found, expected)


def test_shares_that_fall_between_two_tokens() -> None:
    """Masses of 1, 1/2, 1/4 ...: sums of units are exact, and so is where they end."""
    masses = 0.5 ** torch.arange(20.0)
    x = masses.log().to(DEVICE)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    total = float(masses.sum())
    for kept in (1, 2, 5, 12):
        share = float(masses[:kept].sum()) / total
        for value, number in ((share - 1e-3, kept), (share + 1e-3, kept + 1)):
            least = top_p.least_in_top_p(
                x[None], torch.tensor([value], device=DEVICE), torch.zeros(1, device=DEVICE)
            )
            if kept < 12:
                assert int((x >= least).sum()) == number
            assert torch.equal(
                least,
                filters.least_in_top_p(
                    x[None], torch.tensor([value], device=DEVICE), torch.zeros(1, device=DEVICE)
                ),
            )


def test_logits_are_scaled_on_the_way_and_rows_without_top_p_are_left_alone() -> None:
    x = torch.from_numpy(logits("spread")).to(DEVICE)
    inverse = torch.linspace(0.5, 3.0, ROWS, device=DEVICE)
    share = torch.tensor([0.9, 1.0, 0.5, torch.inf, 0.99, 0.1], device=DEVICE)
    none = torch.zeros(ROWS, device=DEVICE)
    found = top_p.least_in_top_p(x, share, none, inverse)
    assert torch.equal(found, top_p.least_in_top_p(x * inverse[:, None], share, none))
    assert torch.equal(found == -torch.inf, share >= 1.0)


def test_a_captured_step_draws_what_the_sampler_draws() -> None:
    """Whichever of the two a row meets, its company decides: tokens are the same."""
    x = torch.from_numpy(logits("peaked")[:4]).to(DEVICE)
    vocab = x.shape[1]
    params = [
        SamplingParams(temperature=0.9, top_p=0.8),
        SamplingParams(temperature=1.3, top_p=0.6, min_p=0.02),
        SamplingParams(temperature=0.8, top_k=10, top_p=0.9),
        SamplingParams(temperature=0.0),
    ]
    slots = np.arange(1, 5)
    columns = SamplingColumns(4, vocab)
    sampler = TorchSampler(
        vocab, 4, lambda values: torch.from_numpy(values).to(DEVICE), top_p.least_in_top_p
    )
    for slot, each in enumerate(params, start=1):
        state = SlotSampling(each, stream=77 * slot)
        columns.admit(slot, state)
        sampler._slots[slot] = state
    for index in range(3):
        generated = np.full(4, index)
        words = pack_inputs(4, NO_ROWS._replace(slots=slots), waste_cell=0)
        columns.fill(words, slots, generated)
        assert columns.choice(slots, generated) is Choice.TOP_P
        future = torch.zeros(5, dtype=torch.int32, device=DEVICE)
        inputs = Inputs(torch.from_numpy(words).to(DEVICE))
        drawn = choose(x, inputs, future, Choice.TOP_P)
        expected = sampler.sample(x, [SampleRow(int(slot), index) for slot in slots]).tokens
        assert drawn[0].tolist() == expected.tolist()


def test_any_number_of_rows_takes_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles another kernel for a tensor that begins elsewhere than at 16 bytes."""
    seen: dict[int, set[tuple[str, tuple[bool, ...]]]] = {}

    class Noted:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def note(*args: Any, **_: Any) -> None:
                tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
                aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
                seen.setdefault(grid[0], set()).add((self._name, aligned))

            return note

    for name in ("_largest", "_sum_above", "_pick", "_least_kept"):
        monkeypatch.setattr(top_p, name, Noted(name))
    for num_rows in range(1, 10):
        columns = [torch.full((num_rows,), 0.5, device=DEVICE) for _ in range(2)]
        top_p.least_in_top_p(torch.zeros(num_rows, 512, device=DEVICE), *columns)
    assert len(seen) == 9
    assert all(kernels == seen[1] for kernels in seen.values())
