"""Tokens that our operation draws are those of the rule, and of mlx's operations."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.base import Admit
from pippin.backends.mlx.cpu.operations import without_operations
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.sampler import SampleRow
from pippin.types import SamplingParams
from sampling_rule import KINDS
from sampling_rule import logits as rule_logits

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, min_p=0.05),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.95, min_p=0.2, temperature=1.7),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=1 - 2**-24),
    SamplingParams(top_k=1),
    SamplingParams(top_k=20, top_p=0.8),
    SamplingParams(top_k=200),
    SamplingParams(top_k=96, top_p=0.999, min_p=0.001),
]


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_what_mlx_s_operations_draw(ours: Any, kind: str) -> None:
    """Which the rule is tested with. Of a thousand draws hardly one is as near to a tie as rounding
    reaches."""
    for vocab, num_steps in ((1, 3), (2, 9), (17, 9), (97, 9), (1000, 60), (8192, 9)):
        sampler = MLXSampler(vocab, len(PARAMS) + 1)
        for slot, params in enumerate([*PARAMS, SamplingParams(temperature=0.0)], start=1):
            sampler.admit(Admit(slot, params, (), np.zeros(0, dtype=np.int32), slot))
        logits = mx.array(rule_logits(kind, len(PARAMS) + 1, vocab))
        same = 0
        for step in range(num_steps):
            rows = [SampleRow(slot, 1000 * slot + step) for slot in range(1, len(PARAMS) + 2)]
            tokens = sampler.sample(logits, rows).tokens
            with without_operations():
                expected = sampler.sample(logits, rows).tokens
            same += (tokens == expected).sum().item()
        assert same >= num_steps * (len(PARAMS) + 1) - 3


def test_the_first_of_the_largest_is_taken_wherever_it_is(ours: Any) -> None:
    keys = mx.zeros((1, 2), dtype=mx.uint32)
    greedy = mx.array([[0.0, 0.0, math.inf, 0.0]])
    for vocab in (1, 15, 16, 33):
        for place in range(vocab):
            logits = np.full((1, vocab), -3.0, dtype=np.float32)
            logits[0, place:] = 2.0
            assert ours.choose(mx.array(logits), greedy, keys).item() == place


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_any_logits_draw_a_token(ours: Any, params: SamplingParams, value: float) -> None:
    vocab = 500
    sampler = MLXSampler(vocab, 1)
    sampler.admit(Admit(1, params, (), np.zeros(0, dtype=np.int32), 3))
    logits = rule_logits("spread", 1, vocab)
    for places in (slice(0, 1), slice(3, 400, 2), slice(None)):
        logits[:, places] = value
        token = sampler.sample(mx.array(logits), [SampleRow(1, 0)]).tokens.item()
        assert 0 <= token < vocab


def test_logits_may_be_views(ours: Any) -> None:
    x = mx.array(rule_logits("spread", 6, 64))
    keys = mx.zeros((3, 2), dtype=mx.uint32)
    choices = mx.array([[1.0, 0.0, 0.7, 0.0]] * 3)
    for view in (x[::2], x.T[:3], x[1:4, 10:50], mx.broadcast_to(x[:1], (3, 64))):
        expected = ours.choose(mx.contiguous(view), choices, keys)
        assert mx.array_equal(ours.choose(view, choices, keys), expected)
