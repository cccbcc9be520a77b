"""The blocked state space recurrence against mlx-lm and a float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import ssm as mlx_lm_ssm

from cases import cases
from pippin.backends.mlx.recurrent.ssm import ssm_update
from pippin.backends.mlx.recurrent.taps import tap_states


@dataclass(frozen=True)
class Layer:
    """Arguments of one call, in its order."""

    x: np.ndarray  # [B, T, H, Dh]
    a_log: np.ndarray  # [H]
    b: np.ndarray  # [B, T, G, Ds]
    c: np.ndarray  # [B, T, G, Ds]
    d: np.ndarray  # [H]
    dt: np.ndarray  # [B, T, H]
    dt_bias: np.ndarray  # [H]
    state: np.ndarray | None  # [B, H, Dh, Ds]
    time_step_limit: tuple[float, float] = (0.001, 100.0)
    mask: np.ndarray | None = None  # [B, T]
    lengths: np.ndarray | None = None  # [B]

    def arrays(self) -> list[object]:
        fields = (self.x, self.a_log, self.b, self.c, self.d, self.dt, self.dt_bias, self.state)
        made: list[object] = [None if field is None else mx.array(field) for field in fields]
        tail = [None if field is None else mx.array(field) for field in (self.mask, self.lengths)]
        return [*made, self.time_step_limit, *tail]

    @property
    def real(self) -> np.ndarray:
        """[B, T]: tokens that count."""
        real = np.ones(self.x.shape[:2], bool) if self.mask is None else self.mask
        if self.lengths is not None:
            real = real & (np.arange(real.shape[1]) < self.lengths[:, None])
        return real


def make_layer(
    batch: int = 2,
    num_tokens: int = 130,
    num_heads: int = 4,
    num_groups: int = 2,
    head_dim: int = 8,
    state_dim: int = 16,
    *,
    rates: tuple[float, float] = (0.01, 4.0),
    with_state: bool = True,
    seed: int = 0,
) -> Layer:
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    fields = {
        "x": normal((batch, num_tokens, num_heads, head_dim)),
        "a_log": np.log(rng.uniform(*rates, num_heads)),
        "b": normal((batch, num_tokens, num_groups, state_dim)) * state_dim**-0.5,
        "c": normal((batch, num_tokens, num_groups, state_dim)) * state_dim**-0.5,
        "d": normal(num_heads),
        "dt": normal((batch, num_tokens, num_heads)),
        "dt_bias": normal(num_heads),
        "state": normal((batch, num_heads, head_dim, state_dim)),
    }
    made = {name: x.astype(np.float32) for name, x in fields.items()}
    return Layer(**(made if with_state else {**made, "state": None}))


def float64_recurrence(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, straight from the definition; also every state, [B, T, H, Dh, Ds]."""
    x = layer.x.astype(np.float64)
    repeats = x.shape[2] // layer.b.shape[2]
    b, c = (np.repeat(z.astype(np.float64), repeats, axis=2) for z in (layer.b, layer.c))
    dt = np.logaddexp(0, layer.dt.astype(np.float64) + layer.dt_bias)
    dt = np.clip(dt, *layer.time_step_limit)
    gates = np.exp(-np.exp(layer.a_log.astype(np.float64)) * dt)
    state = np.zeros((*x[:, 0].shape, b.shape[-1])) if layer.state is None else layer.state
    ys, states = [], []
    for t in range(x.shape[1]):
        write = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        new = state * gates[:, t, :, None, None] + write
        ys.append(np.einsum("bhds,bhs->bhd", new, c[:, t]) + x[:, t] * layer.d[:, None])
        state = np.where(layer.real[:, t, None, None, None], new, state)
        states.append(state)
    return np.stack(ys, axis=1), np.stack(states, axis=1)


def assert_matches_recurrence(layer: Layer) -> None:
    with tap_states() as taps:
        y, state = ssm_update(*layer.arrays())
    want_y, want_states = float64_recurrence(layer)
    real = layer.real[..., None, None]
    assert_close(y * mx.array(real), want_y * real)
    assert_close(state, want_states[:, -1])
    num_tokens = want_y.shape[1]
    ends = [min(end, num_tokens) for end in range(64, num_tokens + 64, 64)]
    assert len(taps.states) == 1
    for got, end in zip(taps.states[0], ends, strict=True):
        assert_close(got, want_states[:, end - 1])


@cases("num_tokens", [1, 2, 16, 63, 64, 65, 200])
@cases("with_state", [False, True])
def test_every_kind_of_length_agrees_with_the_recurrence(num_tokens: int, with_state: bool) -> None:
    assert_matches_recurrence(make_layer(num_tokens=num_tokens, with_state=with_state))


@pytest.mark.parametrize("rates", [(1e-9, 1e-8), (1e-3, 1e-2), (1.0, 16.0), (1e3, 1e4)])
def test_slow_and_fast_forgetting_stay_exact(rates: tuple[float, float]) -> None:
    assert_matches_recurrence(make_layer(num_tokens=200, rates=rates))


def test_rows_that_end_in_an_early_block_keep_their_own_state() -> None:
    layer = make_layer(batch=5, num_tokens=600)
    assert_matches_recurrence(replace(layer, lengths=np.array([600, 300, 5, 0, -40])))


def test_a_row_that_has_ended_is_not_stepped() -> None:
    layer = make_layer(batch=3, num_tokens=1)
    assert_matches_recurrence(replace(layer, lengths=np.array([1, 0, -7])))
    assert_matches_recurrence(replace(layer, mask=np.array([[True], [False], [True]])))


@settings(max_examples=40)
@given(data=st.data())
def test_random_shapes_masks_and_lengths_agree_with_the_recurrence(data: st.DataObject) -> None:
    batch, num_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 150))
    num_groups = data.draw(st.integers(1, 3))
    layer = make_layer(
        batch,
        num_tokens,
        num_groups * data.draw(st.integers(1, 3)),
        num_groups,
        data.draw(st.sampled_from([4, 8, 24])),
        data.draw(st.sampled_from([4, 16, 24])),
        with_state=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**16)),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    if data.draw(st.booleans()):
        layer = replace(layer, lengths=rng.integers(-2, num_tokens + 1, batch))
    if data.draw(st.booleans()):
        layer = replace(layer, mask=rng.random((batch, num_tokens)) < 0.7)
    assert_matches_recurrence(layer)


@pytest.mark.parametrize("num_tokens", [1, 70, 300])
@pytest.mark.parametrize("left_padded", [False, True])
def test_the_drop_in_agrees_with_mlx_lm(num_tokens: int, left_padded: bool) -> None:
    layer = make_layer(num_tokens=num_tokens)
    if left_padded and num_tokens > 1:
        layer = replace(layer, mask=np.arange(num_tokens) >= np.array([[0], [num_tokens // 3]]))
    y, state = ssm_update(*layer.arrays())
    want_y, want_state = mlx_lm_ssm.ssm_update(*layer.arrays())
    real = mx.array(layer.real[..., None, None])
    assert_close(y * real, np.array(mx.where(real, want_y, 0)))
    assert_close(state, np.array(want_state))


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_half_precision_inputs_give_mlx_lms_types_and_a_float32_state(num_tokens: int) -> None:
    args = make_layer(num_tokens=num_tokens).arrays()
    for position in (0, 2, 3, 5):
        args[position] = args[position].astype(mx.bfloat16)
    y, state = ssm_update(*args)
    want_y, want_state = mlx_lm_ssm.ssm_update(*args)
    assert y.dtype == want_y.dtype
    assert state.dtype == want_state.dtype == mx.float32
    assert_close(state, np.array(want_state))
    assert_close(y, np.array(want_y.astype(mx.float32)), 1e-2)
