"""A decode step of a Gated DeltaNet layer as one Metal kernel, against mlx-lm's layer.

mlx-lm's runs in plain operations and in float32, on the numbers that the kernel is given.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs

from metal.emulator import BACKWARD, FORWARD, EmulatedKernel, needs_clang, use_emulator
from pippin.backends.mlx.gpu import delta_layer
from pippin.backends.mlx.gpu.delta_layer import KernelDeltaNet, num_simd_groups, use_delta_kernel
from pippin.backends.mlx.recurrent.conv import use_shift_conv1d
from pippin.backends.mlx.recurrent.replay import ReplayedDeltaNet, use_replay
from pippin.backends.mlx.recurrent.taps import tap_states

pytestmark = [needs_clang, pytest.mark.slow]

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
TOLERANCES = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}  # of the largest number
SMALL: tuple[tuple[int, int], tuple[int, int]] = (1, 2), (64, 32)


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch, orders=(FORWARD,))


def layer_of(heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype = F32) -> Any:
    """`heads` and `dims`: of keys and of values."""
    mx.random.seed(heads[1])
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    options = dict(zip((f"linear_{size}" for size in sizes), (*heads, *dims), strict=True))
    layer = GatedDeltaNet(TextModelArgs(hidden_size=64, **options))
    for part, name in ((layer, "dt_bias"), (layer.norm, "weight"), (layer.conv1d, "weight")):
        part[name] = mx.random.normal(part[name].shape).astype(dtype)
    use_shift_conv1d(layer.conv1d, cpu=False)
    use_replay(layer)
    layer.eval()
    return layer


def drawn(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[mx.array, list[mx.array]]:
    """What products leave, side by side, and the state's entries."""
    mx.random.seed(rows)
    width = layer.conv_dim + layer.value_dim + 2 * layer.num_v_heads
    wide = mx.random.normal((rows, 1, width)).astype(dtype)
    inputs = mx.random.normal((rows, layer.conv_kernel_size - 1, layer.conv_dim)).astype(dtype)
    state = mx.random.normal((rows, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim))
    return wide, [inputs, state]


def step(layer: Any, wide: mx.array, entries: list[mx.array]) -> list[mx.array]:
    """A token, without the layer's products: the output, and the new entries."""
    ends = [layer.conv_dim, layer.conv_dim + layer.value_dim, -layer.num_v_heads]
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    for name, part in zip(names, mx.split(wide, ends, axis=-1), strict=True):
        setattr(layer, name, lambda _, part=part: part)
    layer.out_proj = lambda out: out
    cache = ArraysCache(size=2)
    cache.cache = list(entries)
    return [layer(mx.zeros((*wide.shape[:2], 64)), None, cache), *cache.cache]


@pytest.mark.parametrize(
    ("rows", "heads", "dims", "dtype"),
    [
        (1, (16, 16), (128, 128), BF16),  # Qwen3.5 0.8B and 2B
        (2, (1, 2), (128, 128), F16),  # as many to a key head as of 4B, 9B and 35B-A3B
        (1, (2, 6), (128, 128), BF16),  # 27B
        (1, (2, 8), (128, 128), F32),  # 122B-A10B and 397B-A17B
        (5, *SMALL, F32),
        (1, (1, 1), (96, 24), F16),
    ],
)
def test_a_step_is_what_mlx_lm_computes(
    rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: mx.Dtype
) -> None:
    layer = layer_of(heads, dims, dtype)
    wide, entries = drawn(layer, rows, dtype)
    expected = step(layer, wide.astype(F32), [each.astype(F32) for each in entries])
    layer._eps = mx.array([layer.norm.eps])
    layer.__class__ = KernelDeltaNet
    found = step(layer, wide, entries)
    assert [each.dtype for each in found] == [dtype, dtype, F32]
    for ours, plain in zip(found, expected, strict=True):
        worst = mx.abs(ours.astype(F32) - plain.astype(F32)).max() / mx.abs(plain).max()
        assert float(worst) < TOLERANCES[dtype]
    assert mx.array_equal(found[1], expected[1].astype(dtype)).item()


def test_it_does_not_depend_on_the_order_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EmulatedKernel] = []

    class Noted(EmulatedKernel):
        orders = (FORWARD, BACKWARD)

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(mx.fast, "metal_kernel", Noted)
    layer = layer_of(*SMALL)
    use_delta_kernel(layer)
    assert type(layer) is KernelDeltaNet
    step(layer, *drawn(layer, 2, F32))
    assert [each.threadgroup_bytes for each in made] == [4 * (2 * 64 + 2 * 32)]


def test_a_layer_whose_kernel_is_off_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong in (delta_layer.SOURCE.replace("* beta;", ";"), "no Metal"):
        monkeypatch.setattr(delta_layer, "SOURCE", wrong)
        layer = layer_of(*SMALL)
        use_delta_kernel(layer)
        assert type(layer) is ReplayedDeltaNet
        assert "recurrent layers have no kernel" in caplog.text
        caplog.clear()


def test_chunks_and_tapped_states_are_mlx_lm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(*SMALL)
    use_delta_kernel(layer)
    monkeypatch.setattr(KernelDeltaNet, "_between", lambda *_: pytest.fail("the kernel was asked"))
    wide, entries = drawn(layer, 1, F32)
    step(layer, mx.repeat(wide, 2, axis=1), entries)
    with tap_states():
        step(layer, wide, entries)


def test_lanes_keep_a_bounded_part_of_the_state() -> None:
    assert num_simd_groups(128, 128) == 16
    assert num_simd_groups(256, 256) is None  # 128 numbers a lane
    assert num_simd_groups(48, 64) is None  # no multiple of the lanes
