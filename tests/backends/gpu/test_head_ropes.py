"""Norms and rotations that are left to attention: only where a model passes them on untouched."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pippin.backends.mlx.attention.head_ropes import DeferredRopes, deferring, rms_norm, rope

POSITIONS = mx.array([3, 9], dtype=mx.int32)
WEIGHT = mx.ones(8)
OPTIONS = {"traditional": False, "base": 1e4, "scale": 1.0}


def x(heads: int) -> mx.array:
    return mx.random.normal((2, 1, heads, 8), key=mx.random.key(heads))


def ropes() -> DeferredRopes:
    return DeferredRopes(POSITIONS, {id(WEIGHT): WEIGHT})


def test_what_a_model_does_to_queries_and_keys_is_found_again() -> None:
    step, heads = ropes(), (x(4), x(2))
    with deferring(step):
        normed = [rms_norm(each, WEIGHT, 1e-5).transpose(0, 2, 1, 3) for each in heads]
        q, k = (rope(each, 8, offset=POSITIONS, **OPTIONS) for each in normed)
        found = step.of(q, k)
    assert found is not None
    for one, own, returned in zip(found, heads, (q, k), strict=True):
        usual = mx.fast.rms_norm(own, WEIGHT, 1e-5).transpose(0, 2, 1, 3)
        usual = mx.fast.rope(usual, 8, offset=POSITIONS, **OPTIONS)
        assert mx.allclose(one.apply(returned, POSITIONS), usual, atol=1e-6).item()


def test_other_norms_and_other_positions_are_computed() -> None:
    with deferring(ropes()):
        assert not mx.allclose(rms_norm(x(4), mx.ones(8), 1e-5), x(4)).item()
        elsewhere = rope(x(4).swapaxes(1, 2), 8, offset=POSITIONS + 1, **OPTIONS)
    assert not mx.allclose(elsewhere, x(4).swapaxes(1, 2)).item()


@pytest.mark.parametrize("changed", ["queries", "keys", "both"])
def test_what_is_changed_on_the_way_is_an_error(changed: str) -> None:
    step = ropes()
    q, k = x(4).swapaxes(1, 2), x(2).swapaxes(1, 2)

    def attend() -> None:
        with deferring(step):
            rotated = [rope(each, 8, offset=POSITIONS, **OPTIONS) for each in (q, k)]
            factors = changed != "keys", changed != "queries"
            step.of(*(2 * x if factor else x for x, factor in zip(rotated, factors, strict=True)))

    with pytest.raises(TypeError, match="does not pass on what"):
        attend()


def test_a_norm_without_a_rotation_after_it_is_an_error() -> None:
    with pytest.raises(TypeError, match="does not pass on what"), deferring(ropes()):
        rms_norm(x(4), WEIGHT, 1e-5)
