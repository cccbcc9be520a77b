"""Experts chosen by a Metal kernel, against a sort and against mlx-lm's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS, build_from
from metal.emulator import FORWARD, needs_clang, use_emulator
from pippin.backends.mlx.gpu import expert_choice
from pippin.backends.mlx.gpu.expert_choice import OURS, choose_experts, use_expert_kernel

pytestmark = [needs_clang, pytest.mark.slow]

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_emulator(monkeypatch, orders=(FORWARD,))
    expert_choice._kernel.cache_clear()
    yield
    expert_choice._kernel.cache_clear()


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "among", "dtype"),
    [
        (128, 8, True, BF16),  # Qwen3 30B-A3B and 235B-A22B
        (512, 10, True, F32),  # Qwen3-Next 80B, Qwen3.5 397B-A17B
        (256, 8, False, F16),  # Qwen3.5 35B-A3B and 122B-A10B, without norm_topk_prob
        (32, 4, True, BF16),  # gpt-oss 20B, and 128 experts of 120B
        (5, 5, True, F32),
        (1024, 32, False, F32),
    ],
)
def test_the_largest_are_chosen(
    num_experts: int, num_chosen: int, among: bool, dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(num_experts)
    # All different, in every type.
    scores = rng.permuted(np.arange(4 * num_experts).reshape(4, -1) % num_experts, axis=1) / 64
    experts, weights = choose_experts(
        mx.array(scores[:, None]).astype(dtype), num_chosen, among=among
    )
    assert weights.dtype == dtype
    order = np.argsort(-scores, axis=1)[:, :num_chosen]
    np.testing.assert_array_equal(np.array(experts)[:, 0], order)
    expected = np.exp(np.take_along_axis(scores, order, axis=1))
    expected /= (expected if among else np.exp(scores)).sum(axis=1, keepdims=True)
    found = np.array(weights.astype(F32))[:, 0]
    np.testing.assert_allclose(found, expected, rtol={F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype])


def test_no_expert_is_chosen_twice_nor_one_that_there_is_not() -> None:
    """Equal scores, infinite ones and those that are not numbers."""
    rows = [[1.0] * 40, [np.nan] * 40, [-np.inf] * 40, [np.nan, 2.0, -np.inf, 3.0] * 10]
    experts = np.array(choose_experts(mx.array(rows), 12, among=True)[0])
    assert [len(set(row)) for row in experts.tolist()] == [12] * 4
    assert experts.max() < 40
    np.testing.assert_array_equal(experts[0], range(12))
    np.testing.assert_array_equal(experts[3], [*range(3, 40, 4), 1, 5])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe", "gpt_oss"])
def test_a_layer_computes_what_it_did(family: str) -> None:
    model = build_from(CONFIGS[family])
    layer: Any = next(part for _, part in model.named_modules() if type(part) in OURS)
    x = mx.random.normal((3, 1, 64), key=mx.random.key(1))
    expected = layer(x)
    use_expert_kernel(model)
    assert type(layer) in OURS.values()
    assert mx.allclose(layer(x), expected, atol=1e-5 * float(mx.abs(expected).max())).item()


def test_layers_stay_as_they_are_where_the_kernel_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for wrong in (expert_choice.SOURCE.replace("own / total", "own"), "no Metal"):
        monkeypatch.setattr(expert_choice, "SOURCE", wrong)
        expert_choice._kernel.cache_clear()
        model = build_from(CONFIGS["gpt_oss"])
        use_expert_kernel(model)
        assert not any(type(part) in OURS.values() for _, part in model.named_modules())
        assert "experts are chosen by mlx-lm" in caplog.text
        caplog.clear()
