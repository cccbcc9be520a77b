"""The emulator runs Metal kernels of mlx-lm: they agree with mlx-lm's plain operations."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import gated_delta, ssm

from metal.emulator import EmulatedKernel, needs_clang, use_emulator

pytestmark = [needs_clang, pytest.mark.slow]

TOLERANCES = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch)


def worst(one: mx.array, other: mx.array) -> float:
    difference = mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max().item()
    return float(difference) / max(1.0, float(mx.abs(other.astype(mx.float32)).max().item()))


def gated_delta_inputs(dtype: mx.Dtype, *, key_dim: int, vector_gate: bool) -> dict[str, mx.array]:
    mx.random.seed(key_dim)
    shape, key_heads, heads, dim = (2, 3), 2, 4, 16
    keys = {
        name: (mx.random.normal((*shape, key_heads, key_dim)) * key_dim**-0.5).astype(dtype)
        for name in "qk"
    }
    gates = (*shape, heads, key_dim) if vector_gate else (*shape, heads)
    return {
        **keys,
        "v": mx.random.normal((*shape, heads, dim)).astype(dtype),
        "g": mx.random.uniform(shape=gates),
        "beta": mx.random.uniform(shape=(*shape, heads)).astype(dtype),
        "state": mx.random.normal((shape[0], heads, dim, key_dim)),
    }


@dtypes
@pytest.mark.parametrize("vector_gate", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_gated_delta(
    monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype, vector_gate: bool, masked: bool
) -> None:
    name = "_gated_delta_kernel" + "_vec" * vector_gate + "_masked" * masked
    kernel = gated_delta._make_gated_delta_kernel(has_mask=masked, vectorized=vector_gate)
    monkeypatch.setattr(gated_delta, name, kernel)
    inputs: dict[str, Any] = gated_delta_inputs(dtype, key_dim=64, vector_gate=vector_gate)
    mask = mx.array([[True, True, False], [True, False, True]])
    if masked:
        inputs["mask"] = mask
    y, state = gated_delta.gated_delta_kernel(**inputs)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs)
    if masked:
        expected = mx.where(mask[..., None, None], expected, 0)
    assert worst(y, expected) < TOLERANCES[dtype]
    assert worst(state, expected_state) < TOLERANCES[mx.float32]


@dtypes
def test_packed_gated_delta(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    """mlx-lm promises the same bits as its unpacked kernel with the sums written out."""
    packed = gated_delta._make_gated_delta_packed_kernel()
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_packed", packed)
    unpacked = gated_delta._make_gated_delta_kernel_xtree()
    monkeypatch.setattr(gated_delta, "_gated_delta_kernel_xtree", unpacked)
    inputs = gated_delta_inputs(dtype, key_dim=128, vector_gate=False)
    y, state = gated_delta.gated_delta_kernel(**inputs)
    expected, expected_state = gated_delta.gated_delta_ops(**inputs)
    assert worst(y, expected) < TOLERANCES[dtype]
    assert worst(state, expected_state) < TOLERANCES[mx.float32]
    for ours, theirs in zip(
        (y, state), gated_delta.gated_delta_kernel_xtree(**inputs), strict=True
    ):
        assert mx.array_equal(ours, theirs).item()


@dtypes
def test_ssm(monkeypatch: pytest.MonkeyPatch, dtype: mx.Dtype) -> None:
    monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
    mx.random.seed(0)
    rows, heads, groups, dim, state_dim = 2, 4, 2, 8, 64
    x = mx.random.normal((rows, 1, heads, dim)).astype(dtype)
    b, c = (mx.random.normal((rows, 1, groups, state_dim)).astype(dtype) for _ in range(2))
    a_log, d, bias = (mx.random.normal((heads,)) for _ in range(3))
    dt = mx.random.normal((rows, 1, heads)).astype(dtype)
    state = mx.random.normal((rows, heads, dim, state_dim))
    call = (x, a_log, b, c, d, dt, bias, state, (0.001, 100.0))
    out, new_state = ssm.ssm_update_kernel(*call)
    expected, expected_state = ssm.ssm_attn(*call)
    assert worst(out, expected) < TOLERANCES[dtype]
    assert worst(new_state, expected_state) < TOLERANCES[dtype]


@dtypes
def test_a_norm_that_adds_up_in_threadgroup_memory(dtype: mx.Dtype) -> None:
    theirs = import_module("mlx_lm.kernels.norm_add_norm")
    kernel = EmulatedKernel(
        *("pre_norm", ["stream", "pre_w", "pre_eps"], ["normed"]),
        *(theirs._PRE_NORM_ONLY, theirs._BLOCK_SUM_ONCE_HEADER),
    )
    mx.random.seed(0)
    stream, weight = mx.random.normal((3, 200)), mx.random.normal((200,))
    (out,) = kernel(
        inputs=[stream, weight, 1e-5],
        template=[("T", dtype), ("D", 200), ("TG", 96)],
        grid=(3 * 96, 1, 1),
        threadgroup=(96, 1, 1),
        output_shapes=[(3, 200)],
        output_dtypes=[dtype],
    )
    assert worst(out, mx.fast.rms_norm(stream, weight, 1e-5)) < TOLERANCES[dtype]
    assert kernel.threadgroup_bytes == 256
