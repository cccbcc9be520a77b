"""top_k and top_p without a sort of the vocabulary keep the very tokens that a sort keeps.

The oracle is the rule of `backends/sampling.py` in numpy, token by token, on the masses that mlx
found: how a device rounds an exponential is no part of the rule.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.step import filters, largest
from pippin.backends.mlx.step.sampling_state import DrawGroup, build_batch
from pippin.backends.sampling import MASS_UNITS, SlotSampling
from pippin.types import SamplingParams

VOCAB = 1000
ROWS = 6
KINDS = ("spread", "peaked", "tied", "masked", "level")
PARAMS = [
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.3, min_p=0.01),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_p=1 - 2**-24),
    SamplingParams(top_k=200),
    SamplingParams(top_k=VOCAB - 1, top_p=0.999),
    SamplingParams(top_k=333, top_p=0.8, min_p=0.001),
]


def logits(kind: str) -> mx.array:
    rng = np.random.default_rng(KINDS.index(kind))
    x = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
    match kind:
        case "peaked":
            x *= 12
        case "tied":  # few values, as of logits in 8 bits; both zeros among them
            x = np.round(x * 4) / 4
        case "masked":
            x = np.where(rng.random(x.shape) < 0.7, -np.inf, x * 3).astype(np.float32)
        case "level":
            x[:] = 1.5
    return mx.array(x)


def group_of(params: SamplingParams, num_rows: int = ROWS, vocab: int = VOCAB) -> DrawGroup:
    states = [SlotSampling(params)] * num_rows
    (group,) = build_batch(tuple(range(1, num_rows + 1)), states, (), vocab).draws
    return group


def kept_by_rule(params: SamplingParams, x: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """One row. `mass`: of each token, the likeliest one's is 1."""
    units = [int(m * np.float32(MASS_UNITS)) for m in mass]
    keys = x if params.top_k else mass
    order = np.argsort(-keys, kind="stable")
    first = order[: params.top_k] if params.top_k else order
    total = sum(units[i] for i in first)
    share = np.float32(total) * np.float32(params.top_p)
    needed = max(int(np.ceil(share)), 1) if params.top_p < 1 else total + 1
    above, sums = 0, {}
    for i in first:
        sums.setdefault(float(keys[i]), above)  # of what is truly larger
        above += units[i]
    kept = {key for key, larger in sums.items() if larger < needed}
    return np.array([float(key) in kept for key in keys]) & (mass >= np.float32(params.min_p))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_both_forms_keep_what_the_rule_keeps(params: SamplingParams, kind: str) -> None:
    x, group = logits(kind), group_of(params)
    by_sort = np.array(filters.dropped_by_sort(x, group))
    np.testing.assert_array_equal(np.array(filters.dropped_by_bisection(x, group)), by_sort)
    mass = np.array(filters._mass(x, x.max(axis=-1, keepdims=True)))
    for row in range(ROWS):
        expected = kept_by_rule(params, np.array(x)[row], mass[row])
        np.testing.assert_array_equal(~by_sort[row], expected)


def test_metal_bisects_and_others_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    x, group = logits("spread"), group_of(SamplingParams(top_p=0.9))
    asked: list[str] = []
    for name in ("dropped_by_sort", "dropped_by_bisection"):
        monkeypatch.setattr(filters, name, lambda x, group, name=name: asked.append(name))
    for metal in (False, True):
        monkeypatch.setattr(filters, "on_metal", lambda metal=metal: metal)
        filters.dropped_tokens(x, group)
    assert asked == ["dropped_by_sort", "dropped_by_bisection"]


@pytest.mark.parametrize("vocab", [64 * 200, 64 * 200 + 17, 700])
@pytest.mark.parametrize("k", [1, 20])
@pytest.mark.parametrize("step", [0.0, 0.5])
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
