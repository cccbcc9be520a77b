"""Blocked recurrences and convolutions against mlx-lm and a float64 recurrence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import gated_delta as mlx_lm_gated_delta
from mlx_lm.models import ssm as mlx_lm_ssm

from cases import cases
from pippin.backends.mlx.recurrent.recurrences import (
    gated_delta_chunked,
    gated_delta_update,
    normalize_qk,
    ssm_update,
    unit_lower_inverse,
)
from pippin.backends.mlx.recurrent.taps import (
    ShiftConv1d,
    is_depthwise,
    tap_states,
    use_shift_conv1d,
)


def assert_close(got: mx.array, want: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest value wanted, or of one where all are smaller."""
    assert got.shape == want.shape
    largest = np.abs(want).max(initial=1.0)
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), want, rtol=0, atol=tolerance * largest
    )


@cases("cpu", [True, False], ids=["as on CPUs", "as on GPUs"])
@cases("bias", [False, True])
@cases("num_taps", [2, 3, 4])
@cases(("batch", "num_tokens"), [(1, 1), (5, 1), (1, 70), (3, 17)])
def test_the_drop_in_agrees_with_mlx(
    batch: int, num_tokens: int, num_taps: int, bias: bool, cpu: bool
) -> None:
    channels = 24
    conv = nn.Conv1d(channels, channels, num_taps, groups=channels, bias=bias)
    if bias:
        conv.bias = mx.random.normal((channels,), key=mx.random.key(1))
    x = mx.random.normal((batch, num_tokens + num_taps - 1, channels), key=mx.random.key(2))
    want = np.array(conv(x))
    assert is_depthwise(conv)
    use_shift_conv1d(conv, cpu=cpu)
    assert type(conv) is ShiftConv1d
    np.testing.assert_allclose(np.array(conv(x)), want, atol=1e-6, rtol=1e-5)


def test_parameters_and_types_survive_the_swap() -> None:
    conv = nn.Conv1d(8, 8, 4, groups=8)
    conv.set_dtype(mx.bfloat16)
    names = sorted(conv.parameters())
    use_shift_conv1d(conv, cpu=True)
    assert sorted(conv.parameters()) == names
    assert conv(mx.ones((2, 9, 8), dtype=mx.bfloat16)).dtype == mx.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 4},
        {"groups": 8, "stride": 2},
        {"groups": 8, "padding": 3},
        {"groups": 8, "dilation": 2},
    ],
)
def test_other_convolutions_are_not_taken_for_depthwise(options: dict[str, int]) -> None:
    assert not is_depthwise(nn.Conv1d(8, 8, 4, **options))


@dataclass(frozen=True)
class Recurrence:
    """Float32 inputs of one call; `mask` may be None."""

    q: np.ndarray  # [B, T, Hk, Dk]
    k: np.ndarray  # [B, T, Hk, Dk]
    v: np.ndarray  # [B, T, Hv, Dv]
    g: np.ndarray  # [B, T, Hv] or [B, T, Hv, Dk]
    beta: np.ndarray  # [B, T, Hv]
    state: np.ndarray  # [B, Hv, Dv, Dk]
    mask: np.ndarray | None = None  # [B, T]

    def arrays(self) -> list[mx.array]:
        """With gates of masked tokens open, and nothing that they write."""
        mask = np.ones(self.q.shape[:2], bool) if self.mask is None else self.mask
        keep = mask.reshape(*mask.shape, *[1] * (self.g.ndim - 2))
        g = np.where(keep, self.g, np.float32(1.0))
        beta = np.where(mask[..., None], self.beta, np.float32(0.0))
        return [mx.array(x) for x in (self.q, self.k, self.v, g, beta, self.state)]


def make_recurrence(
    batch: int = 1,
    num_tokens: int = 130,
    k_heads: int = 2,
    v_heads: int = 2,
    k_dim: int = 32,
    v_dim: int = 32,
    *,
    gates: tuple[float, float] = (0.8, 1.0),
    betas: tuple[float, float] = (0.0, 1.0),
    vector_gates: bool = False,
    repeated: bool = False,
    seed: int = 0,
) -> Recurrence:
    rng = np.random.default_rng(seed)

    def unit(*shape: int) -> np.ndarray:
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    k = unit(batch, num_tokens, k_heads, k_dim)
    v = rng.standard_normal((batch, num_tokens, v_heads, v_dim))
    if repeated:
        k, v = np.broadcast_to(k[:, :1], k.shape), np.broadcast_to(v[:, :1], v.shape)
    gate_shape = (batch, num_tokens, v_heads, *([k_dim] if vector_gates else []))
    made = {
        "q": unit(batch, num_tokens, k_heads, k_dim) * k_dim**-0.5,
        "k": k,
        "v": v,
        "g": rng.uniform(*gates, gate_shape),
        "beta": rng.uniform(*betas, (batch, num_tokens, v_heads)),
        "state": 0.3 * rng.standard_normal((batch, v_heads, v_dim, k_dim)),
    }
    return Recurrence(**{name: x.astype(np.float32) for name, x in made.items()})


def float64_recurrence(r: Recurrence) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, straight from the definition; also every state, [B, T, Hv, Dv, Dk]."""
    repeats = r.v.shape[2] // r.k.shape[2]
    q, k = (np.repeat(x.astype(np.float64), repeats, axis=2) for x in (r.q, r.k))
    state = r.state.astype(np.float64)
    ys, states = [], []
    for t in range(q.shape[1]):
        g = r.g[:, t].astype(np.float64)
        decayed = state * (g[..., None, None] if g.ndim == 2 else g[..., None, :])
        seen = np.einsum("bhvk,bhk->bhv", decayed, k[:, t])
        delta = (r.v[:, t] - seen) * r.beta[:, t, :, None]
        new = decayed + delta[..., None] * k[:, t, :, None, :]
        ys.append(np.einsum("bhvk,bhk->bhv", new, q[:, t]))
        keep = np.ones(len(new), bool) if r.mask is None else r.mask[:, t]
        state = np.where(keep[:, None, None, None], new, state)
        states.append(state)
    return np.stack(ys, axis=1), np.stack(states, axis=1)


def assert_matches_recurrence(r: Recurrence, tolerance: float = 1e-5) -> None:
    y, state, block_states = gated_delta_chunked(*r.arrays())
    want_y, want_states = float64_recurrence(r)
    real = np.ones(want_y.shape[:2], bool) if r.mask is None else r.mask
    assert_close(y * mx.array(real)[..., None, None], want_y * real[..., None, None], tolerance)
    assert_close(state, want_states[:, -1], tolerance)
    ends = [min(end, want_y.shape[1]) for end in range(64, want_y.shape[1] + 64, 64)]
    assert len(block_states) == len(ends)
    for got, end in zip(block_states, ends, strict=True):
        assert_close(got, want_states[:, end - 1], tolerance)


GATES = [(0.0, 0.0), (0.0, 1e-30), (1e-12, 1e-3), (0.0, 1.0), (0.999, 1.0), (1.0, 1.0)]


BETAS = [(0.0, 1e-6), (1.0 - 1e-6, 1.0), (1.0, 1.0), (1.9, 2.0)]


@cases(
    ("options", "tolerance"),
    [
        *(({"num_tokens": n}, 1e-5) for n in (2, 15, 16, 17, 63, 64, 65, 128, 200)),
        *(
            ({"gates": gates, "repeated": repeated, "vector_gates": vector}, 1e-5)
            for gates, repeated, vector in product(GATES, (False, True), (False, True))
        ),
        *(({"betas": betas, "gates": (0.99, 1.0)}, 1e-5) for betas in BETAS),
        *(({"betas": betas, "gates": (0.99, 1.0), "repeated": True}, 1e-5) for betas in BETAS[:3]),
        # Near 2 a repeated token is reflected at every step: rounding is passed on undamped.
        ({"betas": BETAS[3], "gates": (0.99, 1.0), "repeated": True}, 1e-4),
        (
            {"num_tokens": 2048, "repeated": True, "gates": (0.9999, 1.0), "betas": (0.5, 1.0)},
            5e-5,
        ),
    ],
)
def test_lengths_gates_and_betas_of_every_kind(options: dict[str, Any], tolerance: float) -> None:
    assert_matches_recurrence(make_recurrence(**options), tolerance)
    if options == {"num_tokens": 200}:  # a gate that closes once forgets all that came before
        r = make_recurrence(gates=(0.99, 1.0), **options)
        r.g[:, [5, 70, 100]] = 0.0
        assert_matches_recurrence(r)


@settings(max_examples=40)
@given(data=st.data())
def test_random_shapes_masks_and_gates_agree_with_the_recurrence(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    num_tokens = data.draw(st.integers(2, 150))
    k_heads = data.draw(st.integers(1, 3))
    r = make_recurrence(
        batch,
        num_tokens,
        k_heads,
        k_heads * data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([8, 16, 24, 32])),
        data.draw(st.sampled_from([8, 16, 40])),
        gates=data.draw(st.sampled_from([(0.0, 1.0), (0.9, 1.0), (1e-20, 1e-2)])),
        betas=data.draw(st.sampled_from([(0.0, 1.0), (0.0, 2.0)])),
        vector_gates=data.draw(st.booleans()),
        seed=data.draw(st.integers(0, 2**16)),
    )
    mask_kind = data.draw(st.sampled_from(["none", "right-padded", "holes"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    if mask_kind == "right-padded":
        lengths = rng.integers(0, num_tokens + 1, batch)
        r = replace(r, mask=np.arange(num_tokens) < lengths[:, None])
    elif mask_kind == "holes":
        r = replace(r, mask=rng.random((batch, num_tokens)) < 0.7)
    assert_matches_recurrence(r)


def make_layer_call(
    num_tokens: int, *, vector_gates: bool = False, dtype: mx.Dtype = mx.float32
) -> list[mx.array]:
    """q, k, v, a, b, A_log, dt_bias as a model passes them."""
    r = make_recurrence(2, num_tokens, 2, 4, 32, 16)
    rng = np.random.default_rng(1)
    extra = [32] if vector_gates else []
    a = rng.standard_normal((2, num_tokens, 4, *extra)) * 3
    b = rng.standard_normal((2, num_tokens, 4)) * 2
    a_log = np.log(rng.uniform(0.1, 16, (4, 1) if vector_gates else (4,)))
    dt_bias = rng.standard_normal((4, *extra))
    return [mx.array(x).astype(dtype) for x in (r.q, r.k, r.v, a, b)] + [
        mx.array(x.astype(np.float32)) for x in (a_log, dt_bias)
    ]


@cases("num_tokens", [1, 5, 100])
@cases("with_state", [False, True])
@cases("with_mask", [False, True])
@cases(
    ("vector_gates", "options"),
    [
        (False, {}),
        (False, {"allow_neg_eigval": True}),
        (True, {}),
        (True, {"lower_bound": -5.0}),
    ],
)
def test_the_drop_in_agrees_with_mlx_lm(
    num_tokens: int, with_state: bool, with_mask: bool, vector_gates: bool, options: dict
) -> None:
    call = make_layer_call(num_tokens, vector_gates=vector_gates)
    state = mx.random.normal((2, 4, 16, 32), key=mx.random.key(3)) if with_state else None
    mask = mx.arange(num_tokens) < mx.array([[num_tokens], [num_tokens // 2]])
    mask = mask if with_mask else None
    y, new_state = gated_delta_update(*call, state, mask, **options)
    want_y, want_state = mlx_lm_gated_delta.gated_delta_update(
        *call, state, mask, use_kernel=False, **options
    )
    real = mx.ones((2, num_tokens)) if mask is None else mask
    real = real[..., None, None]
    assert_close(y * real, np.array(want_y * real))
    assert_close(new_state, np.array(want_state))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 100])
def test_half_precision_inputs_keep_their_dtype_and_a_float32_state(
    num_tokens: int, dtype: mx.Dtype
) -> None:
    call = make_layer_call(num_tokens, dtype=dtype)
    y, state = gated_delta_update(*call)
    want_y, want_state = mlx_lm_gated_delta.gated_delta_update(*call, use_kernel=False)
    assert y.dtype == want_y.dtype == dtype
    assert state.dtype == want_state.dtype == mx.float32
    # The state sees only the inputs' rounding; the output is rounded once, to the input's type.
    assert_close(state, np.array(want_state))
    assert_close(y, np.array(want_y.astype(mx.float32)), 1e-2 if dtype == mx.bfloat16 else 1e-3)


def test_a_tap_sees_each_layer_in_order_and_leaves_nothing_behind() -> None:
    first, second = make_layer_call(130), make_layer_call(1)
    with tap_states() as taps:
        _, first_state = gated_delta_update(*first)
        _, second_state = gated_delta_update(*second)
    gated_delta_update(*first)
    assert [len(states) for states in taps.states] == [3, 1]
    assert_close(taps.states[0][-1], np.array(first_state))
    assert_close(taps.states[1][-1], np.array(second_state))
    prefix = [x[:, :64] for x in first[:5]] + first[5:]
    assert_close(taps.states[0][0], np.array(gated_delta_update(*prefix)[1]))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_the_inverse_reads_only_what_lies_below_the_diagonal(size: int) -> None:
    rng = np.random.default_rng(0)
    strict = np.tril(rng.standard_normal((3, size, size)) * 0.2, -1)
    junk = strict + np.triu(rng.standard_normal((3, size, size)))
    got = unit_lower_inverse(mx.array(junk.astype(np.float32)))
    assert_close(got, np.linalg.inv(np.eye(size) - strict))


@cases("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@cases("dim", [64, 96, 128])
def test_scales_as_weights_of_norms_change_no_bit(dim: int, dtype: mx.Dtype) -> None:
    q, k = (mx.random.normal((2, 3, 4, dim), key=mx.random.key(n)).astype(dtype) for n in (0, 1))
    for ours, theirs in zip(
        normalize_qk(q, k, inv_scale=dim**-0.5, eps=1e-6),
        mlx_lm_gated_delta.normalize_qk(q, k, inv_scale=dim**-0.5, eps=1e-6),
        strict=True,
    ):
        assert ours.dtype == dtype
        assert mx.array_equal(ours, theirs).item()


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


def float64_ssm(layer: Layer) -> tuple[np.ndarray, np.ndarray]:
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


def assert_matches_ssm(layer: Layer) -> None:
    with tap_states() as taps:
        y, state = ssm_update(*layer.arrays())
    want_y, want_states = float64_ssm(layer)
    real = layer.real[..., None, None]
    assert_close(y * mx.array(real), want_y * real)
    assert_close(state, want_states[:, -1])
    num_tokens = want_y.shape[1]
    ends = [min(end, num_tokens) for end in range(64, num_tokens + 64, 64)]
    assert len(taps.states) == 1
    for got, end in zip(taps.states[0], ends, strict=True):
        assert_close(got, want_states[:, end - 1])


@cases("num_tokens", [1, 2, 16, 63, 64, 65, 200])
def test_every_kind_of_length_agrees_with_the_recurrence(num_tokens: int) -> None:
    """With and without a state; rows that have ended, that end early, and that are masked."""
    for with_state in (False, True):
        assert_matches_ssm(make_layer(num_tokens=num_tokens, with_state=with_state))
    layer = make_layer(batch=5, num_tokens=3 * num_tokens)
    ends = 3 * num_tokens // np.array([1, 2, 100, 700, -4])
    assert_matches_ssm(replace(layer, lengths=ends))
    mask = np.array([[True], [False], [True], [True], [False]]).repeat(3 * num_tokens, axis=1)
    assert_matches_ssm(replace(layer, mask=mask))
    for rates in ((1e-9, 1e-8), (1e-3, 1e-2), (1.0, 16.0), (1e3, 1e4)):
        assert_matches_ssm(make_layer(num_tokens=num_tokens, rates=rates))


@settings(max_examples=40)
@given(data=st.data())
def test_ssm_of_random_shapes_agrees(data: st.DataObject) -> None:
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
    assert_matches_ssm(layer)


@pytest.mark.parametrize("num_tokens", [1, 70, 300])
@pytest.mark.parametrize("left_padded", [False, True])
def test_ssm_agrees_with_mlx_lm(num_tokens: int, left_padded: bool) -> None:
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
