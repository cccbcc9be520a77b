"""Sums with the norm after them as one Metal kernel, and the stand-ins that leave them to it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gemma3_text

from metal.emulator import needs_clang, use_emulator
from metal.generated_source import KernelFault
from pippin.backends.mlx.attention.packed_rows import AttentionPaths, attend_joined
from pippin.backends.mlx.gpu import added_norms
from pippin.backends.mlx.gpu.added_norms import (
    PendingSum,
    add_and_norm,
    adding_later,
    rms_norm,
    use_pending_sums,
)
from pippin.backends.mlx.substitutions import active
from pippin.backends.mlx.trial_run import adds_later
from serving import served

pytestmark = [needs_clang, pytest.mark.slow]

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch)


def draw(*shape: int, dtype: mx.Dtype = F32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(sum(shape))).astype(dtype)


@pytest.mark.parametrize(
    ("num_rows", "size", "dtype"),
    [(1, 64, F32), (3, 1000, F16), (2, 2880, BF16), (1, 4096, BF16), (2, 7168, F32), (64, 96, F16)],
)
def test_a_sum_and_its_norm(num_rows: int, size: int, dtype: mx.Dtype) -> None:
    x, y, weight = draw(num_rows, 1, size, dtype=dtype), draw(num_rows, 1, size + 1), draw(size)
    y, weight = y[..., 1:].astype(dtype), weight.astype(dtype)
    total, normed = add_and_norm(x, y, weight, 1e-5)
    assert mx.array_equal(total, x + y).item()
    exact = np.array((x + y).astype(F32)).astype(np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + 1e-5)
    exact *= np.array(weight.astype(F32))
    rtol = {F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}[dtype]
    np.testing.assert_allclose(np.array(normed.astype(F32)), exact, rtol=rtol, atol=rtol / 100)


def test_a_stand_in_is_what_it_stands_for() -> None:
    x, y, z, weight = draw(2, 1, 64), draw(2, 1, 65)[..., 1:], draw(2, 1, 66)[..., 2:], draw(64)
    pending = PendingSum(x) + y
    normed = rms_norm(pending, weight, 1e-5)
    assert mx.allclose(normed, mx.fast.rms_norm(x + y, weight, 1e-5), atol=1e-5).item()
    assert mx.array_equal(pending.array, x + y).item()
    assert mx.allclose(rms_norm(pending, weight, 1e-5), normed, atol=1e-5).item()
    assert mx.array_equal((pending + PendingSum(z)).array, x + y + z).item()
    assert (pending.shape, pending.dtype) == (x.shape, x.dtype)
    without = PendingSum(x) + y
    assert mx.allclose(
        rms_norm(without, None, 1e-5), mx.fast.rms_norm(x + y, None, 1e-5), atol=1e-5
    )


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5", "gemma3"])
def test_a_model_is_tried_at_load(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, paths = served(family), AttentionPaths(attend_joined)
    use_pending_sums(loaded.model)
    used: list[int] = []

    def noted(*args: object) -> tuple[mx.array, mx.array]:
        used.append(1)
        return add_and_norm(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(added_norms, "add_and_norm", noted)
    monkeypatch.setattr(gemma3_text, "clip_residual", added_norms._clip_residual)
    takes = family != "gemma3"
    assert adds_later(loaded.layout, loaded.forward, paths) is takes
    assert len(used) == (2 * len(loaded.model.layers) if takes else 0)
    broken = added_norms.SOURCE.replace("+ eps[0]", "+ 1.0f")
    monkeypatch.setattr(added_norms, "SOURCE", broken)
    assert not adds_later(loaded.layout, loaded.forward, paths)


def test_gemma_adds_by_a_function_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is substituted on GPUs. In float16 it has limits, and is computed at once."""
    monkeypatch.setattr(gemma3_text, "clip_residual", added_norms.clip_residual)
    loaded = served("gemma3")
    use_pending_sums(loaded.model)
    paths = AttentionPaths(attend_joined)
    assert adds_later(loaded.layout, loaded.forward, paths)
    x, y = mx.full((1, 64), 5e4), mx.full((1, 64), 4e4)
    for dtype, limit in ((F32, 9e4), (F16, 65504.0)):
        given = x.astype(dtype), y.astype(dtype)
        pending = added_norms.clip_residual(PendingSum(given[0]), given[1])
        assert isinstance(pending, PendingSum) is (dtype == F32)
        found = pending.array if isinstance(pending, PendingSum) else pending
        assert mx.array_equal(found, added_norms.clip_residual(*given)).item()
        assert float(found.max()) == limit


def test_layers_are_made_over_once_and_only_inside() -> None:
    model = served("llama").model
    use_pending_sums(model)
    kinds = [type(layer) for layer in model.layers]
    use_pending_sums(model)
    assert [type(layer) for layer in model.layers] == kinds
    x = draw(1, 1, 64)
    assert isinstance(model.layers[0](x), mx.array)
    with active(), adding_later(active=True):
        assert isinstance(model.layers[0](x), PendingSum)


def test_a_missing_barrier_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    monkeypatch.setattr(added_norms, "SOURCE", added_norms.SOURCE.replace(barrier, ""))
    with pytest.raises(KernelFault, match=r"race|which nothing has written"):
        add_and_norm(draw(1, 512), draw(1, 512), draw(512), 1e-5)
