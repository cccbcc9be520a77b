"""top_p without top_k keeps the very tokens that the rule keeps, however it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from cases import cases

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import torch

from pippin.backends.sampling.rules import SlotSampling
from pippin.backends.torch.step.decode_inputs import Choice, SamplingColumns
from pippin.backends.torch.step.filters import least_in_top_p
from pippin.types import SamplingParams
from sampling_rule import KINDS, PARAMS, ROWS, VOCAB, kept_by_rule, logits

TOP_P = [params for params in PARAMS if not params.top_k]


@cases("kind", KINDS)
@cases("params", TOP_P, ids=str)
def test_a_sort_keeps_what_the_rule_keeps(params: SamplingParams, kind: str) -> None:
    x = torch.from_numpy(logits(kind))
    columns = (torch.full((ROWS,), value) for value in (params.top_p, params.min_p))
    least = least_in_top_p(x, *columns)
    mass = torch.exp(x - x.amax(dim=-1, keepdim=True)).numpy()
    for row in range(ROWS):
        expected = kept_by_rule(params, x[row].numpy(), mass[row])
        np.testing.assert_array_equal((x[row] >= least[row]).numpy(), expected)


def test_rows_without_top_p_lose_nothing() -> None:
    x = torch.from_numpy(logits("masked"))
    off = torch.tensor([1.0, torch.inf] * (ROWS // 2))
    assert (least_in_top_p(x, off, torch.zeros(ROWS)) == -torch.inf).all()


@cases(
    ("params", "choice"),
    [
        (SamplingParams(temperature=0.7, top_p=0.9), Choice.TOP_P),
        (SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1), Choice.TOP_P),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=20), Choice.DRAWN),
        (SamplingParams(temperature=0.7), Choice.DRAWN),
        (SamplingParams(temperature=0.0, top_p=0.9), Choice.GREEDY),
        (SamplingParams(temperature=0.7, top_p=0.9, top_k=200), Choice.LOGITS),
        (SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=1.0), Choice.LOGITS),
        (SamplingParams(temperature=0.7, top_p=0.9, logprobs=1), Choice.LOGITS),
    ],
    ids=str,
)
def test_top_p_alone_is_drawn_inside_a_captured_step(
    params: SamplingParams, choice: Choice
) -> None:
    columns = SamplingColumns(2, VOCAB)
    columns.admit(1, SlotSampling(params))
    columns.admit(2, SlotSampling(SamplingParams(temperature=0.0)))
    assert columns.choice(np.array([1, 2]), np.zeros(2, dtype=np.int64)) is choice
