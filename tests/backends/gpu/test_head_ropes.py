"""Norms and rotations that are left to attention: only where a model passes them on untouched."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pippin.backends.mlx.attention.head_ropes import (
    DeferredRopes,
    deferring,
    rms_norm,
    rope,
    what_is_left,
)

POSITIONS = mx.array([3, 9], dtype=mx.int32)
WEIGHT = mx.ones(8)
OPTIONS = {"traditional": False, "base": 1e4, "scale": 1.0}


def x(heads: int) -> mx.array:
    return mx.random.normal((2, 1, heads, 8), key=mx.random.key(heads))


def ropes() -> DeferredRopes:
    return DeferredRopes(POSITIONS, {id(WEIGHT): WEIGHT})


def test_what_a_model_does_to_queries_and_keys_is_found_again() -> None:
    heads = x(4), x(2)
    with deferring(ropes()):
        normed = [rms_norm(each, WEIGHT, 1e-5).transpose(0, 2, 1, 3) for each in heads]
        q, k = (rope(each, 8, offset=POSITIONS, **OPTIONS) for each in normed)
    *arrays, found = what_is_left(q, k * 0.5)
    assert found is not None
    for one, own, array, gain in zip(found, heads, arrays, (1.0, 0.5), strict=True):
        usual = mx.fast.rms_norm(own, WEIGHT, 1e-5).transpose(0, 2, 1, 3)
        usual = mx.fast.rope(usual, 8, offset=POSITIONS, **OPTIONS)
        assert mx.allclose(one.apply(array, POSITIONS), gain * usual, atol=1e-6).item()


def test_other_norms_and_other_positions_are_computed() -> None:
    with deferring(ropes()):
        assert not mx.allclose(rms_norm(x(4), mx.ones(8), 1e-5), x(4)).item()
        elsewhere = rope(x(4).swapaxes(1, 2), 8, offset=POSITIONS + 1, **OPTIONS)
    assert not mx.allclose(elsewhere, x(4).swapaxes(1, 2)).item()


def test_what_is_changed_on_the_way_is_an_error() -> None:
    with deferring(ropes()):
        q, k = (rope(x(n).swapaxes(1, 2), 8, offset=POSITIONS, **OPTIONS) for n in (4, 2))
        other = rope(x(2).swapaxes(1, 2), 4, offset=POSITIONS, **OPTIONS)
    for change in (lambda: q + 1, lambda: q.astype(mx.float16), lambda: q * mx.ones(2)):
        with pytest.raises((AttributeError, TypeError)):
            change()
    for queries, keys in ((q, k.x), (q.x, k), (q, other)):
        with pytest.raises(TypeError, match="does not pass on what"):
            what_is_left(queries, keys)
    assert what_is_left(q.x, k.x) == (q.x, k.x, None)


def test_a_norm_without_a_rotation_after_it_is_an_error() -> None:
    with pytest.raises(TypeError, match="does not pass on what"), deferring(ropes()):
        rms_norm(x(4), WEIGHT, 1e-5)
