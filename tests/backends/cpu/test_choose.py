"""Tokens that our operation draws are those of the rule, and of mlx's operations."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.base import Admit
from pippin.backends.mlx.cpu.operations.bindings import Operations, without_operations
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits, stream_of
from pippin.backends.sampling.rules import FAR, MASS_UNITS
from pippin.backends.sampling.sampler import SampleRow
from pippin.types import SamplingParams

EXACT = 4e-5  # of a sum of logit and noise, both below a hundred: logarithms may be some units off
KINDS = ("spread", "peaked", "tied", "masked", "level")
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


def some_logits(kind: str, num_rows: int, vocab: int) -> np.ndarray:
    draw = np.random.default_rng(KINDS.index(kind))
    x = draw.normal(size=(num_rows, vocab)).astype(np.float32)
    match kind:
        case "peaked":
            x *= 12
        case "tied":  # both zeros among them
            x = np.round(x * 4) / 4
        case "masked":
            x = np.where(draw.random(x.shape) < 0.7, np.float32(-FAR), x * 3).astype(np.float32)
            x[:, 0] = 1.0
        case "level":
            x[:] = 1.5
    return x


def sums_by_rule(params: SamplingParams, logits: np.ndarray, key: np.ndarray) -> np.ndarray:
    """One row: logits and noise of what the filters keep, -inf for the rest. In float64, but for
    what is told to be float32; a filter that nearly takes a token is told as one that may."""
    x = logits.astype(np.float64) / params.temperature
    mass = np.exp(x - x.max())
    order = np.argsort(-x, kind="stable")
    k = params.top_k if 0 < params.top_k < len(x) else len(x)
    units = np.floor(mass[order][:k] * MASS_UNITS)
    kept = x >= x[order[k - 1]]
    if params.top_p < 1:
        # The least one of those whose larger ones have less than top_p of the mass.
        above = np.cumsum(units) - units
        last = max(int((above < params.top_p * units.sum() * (1 + 1e-7)).sum()) - 1, 0)
        kept &= x >= x[order[last]] - 1e-6
    kept &= mass >= params.min_p * (1 - 1e-6)
    noise = gumbel(random_bits(key[None], len(x)))[0].astype(np.float64)
    return np.where(kept, x + noise, -np.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 17, 97, 1000, 8192])
def test_a_token_is_the_largest_sum_of_what_is_kept(
    ours: Operations, vocab: int, kind: str
) -> None:
    seeds = np.arange(len(PARAMS)) * 7919
    sampler = MLXSampler(vocab, len(PARAMS))
    for slot, (params, seed) in enumerate(zip(PARAMS, seeds, strict=True), start=1):
        sampler.admit(Admit(slot, params, (), np.zeros(0, dtype=np.int32), int(seed)))
    streams = np.array([stream_of(int(seed)) for seed in seeds], dtype=np.uint64)
    logits = some_logits(kind, len(PARAMS), vocab)
    for step in range(12):
        indices = [step * 1000 + slot for slot in range(len(PARAMS))]
        rows = [SampleRow(slot, index) for slot, index in enumerate(indices, start=1)]
        tokens = np.array(sampler.sample(mx.array(logits), rows).tokens)
        keys = noise_keys(streams, indices)
        for row, params in enumerate(PARAMS):
            sums = sums_by_rule(params, logits[row], keys[row])
            assert sums[tokens[row]] >= sums.max() - EXACT, params


@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_what_mlx_s_operations_draw(ours: Operations, kind: str) -> None:
    """Of a thousand draws hardly one is as near to a tie as rounding reaches."""
    vocab, num_steps = 1000, 100
    sampler = MLXSampler(vocab, len(PARAMS) + 1)
    for slot, params in enumerate([*PARAMS, SamplingParams(temperature=0.0)], start=1):
        sampler.admit(Admit(slot, params, (), np.zeros(0, dtype=np.int32), slot))
    logits = mx.array(some_logits(kind, len(PARAMS) + 1, vocab))
    same = 0
    for step in range(num_steps):
        rows = [SampleRow(slot, step) for slot in range(1, len(PARAMS) + 2)]
        tokens = sampler.sample(logits, rows).tokens
        with without_operations():
            expected = sampler.sample(logits, rows).tokens
        same += (tokens == expected).sum().item()
    assert same >= num_steps * (len(PARAMS) + 1) - 3


def test_the_first_of_the_largest_is_taken_wherever_it_is(ours: Operations) -> None:
    keys = mx.zeros((1, 2), dtype=mx.uint32)
    greedy = mx.array([[0.0, 0.0, math.inf, 0.0]])
    for vocab in (1, 15, 16, 33):
        for place in range(vocab):
            logits = np.full((1, vocab), -3.0, dtype=np.float32)
            logits[0, place:] = 2.0
            assert ours.choose(mx.array(logits), greedy, keys).item() == place


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_any_logits_draw_a_token(ours: Operations, params: SamplingParams, value: float) -> None:
    vocab = 500
    sampler = MLXSampler(vocab, 1)
    sampler.admit(Admit(1, params, (), np.zeros(0, dtype=np.int32), 3))
    logits = some_logits("spread", 1, vocab)
    for places in (slice(0, 1), slice(3, 400, 2), slice(None)):
        logits[:, places] = value
        token = sampler.sample(mx.array(logits), [SampleRow(1, 0)]).tokens.item()
        assert 0 <= token < vocab


def test_logits_may_be_views(ours: Operations) -> None:
    x = mx.array(some_logits("spread", 6, 64))
    keys = mx.zeros((3, 2), dtype=mx.uint32)
    choices = mx.array([[1.0, 0.0, 0.7, 0.0]] * 3)
    for view in (x[::2], x.T[:3], x[1:4, 10:50], mx.broadcast_to(x[:1], (3, 64))):
        expected = ours.choose(mx.contiguous(view), choices, keys)
        assert mx.array_equal(ours.choose(view, choices, keys), expected)
