"""top_k and top_p keep the very tokens that the rule keeps.

The oracle is the rule of `sampling/rules.py` in numpy, token by token, on the masses that mlx
found: how a device rounds an exponential is no part of the rule.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from cases import cases
from pippin.backends.mlx.step import filters, largest
from pippin.backends.mlx.step.sampler import send
from pippin.backends.sampling.batches import DrawGroup, SampleBatch
from pippin.backends.sampling.rules import SlotSampling
from pippin.types import SamplingParams
from sampling_rule import KINDS, PARAMS, ROWS, VOCAB, kept_by_rule, logits


def group_of(
    params: SamplingParams, num_rows: int = ROWS, vocab: int = VOCAB
) -> DrawGroup[mx.array]:
    states = [SlotSampling(params)] * num_rows
    (group,) = SampleBatch(tuple(range(1, num_rows + 1)), states, (), vocab, send).draws
    return group


@cases("kind", KINDS)
@cases("params", PARAMS, ids=str)
def test_a_sort_keeps_what_the_rule_keeps(params: SamplingParams, kind: str) -> None:
    x, group = mx.array(logits(kind)), group_of(params)
    by_sort = np.array(filters._dropped_by_sort(x, group))
    mass = np.array(mx.exp(x - x.max(axis=-1, keepdims=True)))
    for row in range(ROWS):
        expected = kept_by_rule(params, np.array(x)[row], mass[row])
        np.testing.assert_array_equal(~by_sort[row], expected)


@cases("vocab", [64 * 200, 64 * 200 + 17, 700])
@cases("k", [1, 20])
@cases("step", [0.0, 0.5])
def test_the_largest_are_found_among_few(vocab: int, k: int, step: float) -> None:
    """`step`: numbers are multiples of it, so that many tie."""
    drawn = np.random.default_rng(vocab).normal(size=(3, vocab)).astype(np.float32)
    x = np.round(drawn / step) * np.float32(step) if step else drawn
    found = np.sort(np.array(largest.largest(mx.array(x), k)), axis=-1)
    np.testing.assert_array_equal(found, np.sort(x, axis=-1)[:, -k:])
    values, indices = (np.array(part) for part in largest.candidates(mx.array(x), k))
    np.testing.assert_array_equal(values, np.take_along_axis(x, indices, axis=-1))
    assert values.shape[-1] == (vocab if vocab < 4 * k * largest.BLOCK else k * 64 + vocab % 64)
    assert all(len(set(row)) == len(row) for row in indices.tolist())
