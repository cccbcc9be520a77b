"""Experts chosen, and Gated DeltaNet steps, by Metal kernels: against a sort and mlx-lm's layers.

mlx-lm's run in plain operations and in float32, on the numbers that the kernels are given.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.qwen3_5 import GatedDeltaNet, TextModelArgs
from mlx_lm.models.switch_layers import SwitchGLU

from cases import cases
from every_family import EVERY
from families import CONFIGS, build_from
from metal.emulator import BACKWARD, FORWARD, EmulatedKernel, needs_clang, use_emulator
from pippin.backends.mlx.gpu import delta_layer, experts
from pippin.backends.mlx.gpu.delta_layer import KernelDeltaNet, num_simd_groups, use_delta_kernel
from pippin.backends.mlx.gpu.experts import (
    OURS,
    ExpertChoice,
    StackedGLU,
    added_up,
    biased_swiglu,
    stack_experts,
    use_expert_kernels,
)
from pippin.backends.mlx.recurrent.replay import ReplayedDeltaNet, use_replay
from pippin.backends.mlx.recurrent.taps import tap_states, use_shift_conv1d

pytestmark = [needs_clang, pytest.mark.slow]

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    use_emulator(monkeypatch, orders=(FORWARD,))


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
    choice = ExpertChoice(num_experts, num_chosen, normed=among)
    experts, weights = choice.choose(mx.array(scores[:, None]).astype(dtype))
    assert weights.dtype == dtype
    order = np.argsort(-scores, axis=1)[:, :num_chosen]
    np.testing.assert_array_equal(np.array(experts)[:, 0], order)
    expected = np.exp(np.take_along_axis(scores, order, axis=1))
    expected /= (expected if among else np.exp(scores)).sum(axis=1, keepdims=True)
    found = np.array(weights.astype(F32))[:, 0]
    np.testing.assert_allclose(found, expected, rtol={F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype])


def test_an_expert_of_every_token_follows_those_that_are_chosen() -> None:
    """By a part of a wide product, as it lies."""
    wide = mx.random.normal((4, 1, 41), key=mx.random.key(0))
    gates, gate = wide[..., :40], wide[..., 40:]
    choice = ExpertChoice(40, 3, normed=True)
    experts, weights = choice.choose(gates)
    for shared, weight in ((True, mx.ones((4, 1, 1))), (gate, mx.sigmoid(gate))):
        found, their_weights = choice.choose(gates, shared=shared)
        assert mx.array_equal(found[..., :3], experts).item()
        assert found[..., 3].tolist() == [[40]] * 4
        expected = mx.concatenate([weights, weight], axis=-1)
        assert mx.allclose(their_weights, expected, rtol=1e-5).item()


def in_groups(
    num_experts: int, num_chosen: int, groups: int, kept: int, factor: float, *, normed: bool
) -> ExpertChoice:
    return ExpertChoice(num_experts, num_chosen, normed, True, groups, kept, factor)


def test_no_expert_is_chosen_twice_nor_one_that_there_is_not() -> None:
    """Equal scores, infinite ones and those that are not numbers."""
    rows = [[1.0] * 40, [np.nan] * 40, [-np.inf] * 40, [np.nan, 2.0, -np.inf, 3.0] * 10]
    plain, biased = ExpertChoice(40, 12, normed=True), {"bias": mx.zeros(40)}
    grouped = [in_groups(40, 12, 5, kept, 1.0, normed=True) for kept in (2, 5)]
    for choice, given in ((plain, {}), *((each, biased) for each in grouped)):
        experts = np.array(choice.choose(mx.array(rows), **given)[0])
        assert [len(set(row)) for row in experts.tolist()] == [12] * 4
        assert experts.max() < 40
        if choice is plain:
            np.testing.assert_array_equal(experts[0], range(12))
            np.testing.assert_array_equal(experts[3], [*range(3, 40, 4), 1, 5])


@pytest.mark.parametrize(
    ("choice", "dtype"),
    [
        (in_groups(256, 8, 8, 4, 2.5, normed=True), F32),  # DeepSeek V3
        (in_groups(384, 8, 1, 1, 2.827, normed=True), BF16),  # Kimi K2
        (in_groups(160, 8, 1, 1, 2.5, normed=True), F16),  # GLM-4.6
        (in_groups(64, 4, 1, 1, 1.8, normed=True), F32),  # GLM-4.7-Flash
        (in_groups(40, 6, 5, 2, 1.0, normed=False), F32),
        (in_groups(32, 3, 32, 31, 1.0, normed=True), F32),
    ],
)
def test_the_best_groups_and_the_largest_of_them_are_chosen(
    choice: ExpertChoice, dtype: mx.Dtype
) -> None:
    rng = np.random.default_rng(choice.num_experts)
    gates = mx.array(rng.normal(size=(5, choice.num_experts))).astype(dtype)
    bias = rng.uniform(-0.1, 0.1, choice.num_experts)
    experts, weights = choice.choose(gates[:, None], mx.array(bias))
    assert weights.dtype == F32
    share = 1 / (1 + np.exp(-np.array(gates.astype(F32)).astype(np.float64)))
    for row in range(5):
        score = share[row] + bias
        groups = score.reshape(choice.num_groups, -1)
        best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        dropped = np.argsort(best)[: choice.num_groups - choice.num_kept]
        groups[dropped] = 0.0
        largest = np.argsort(-score)[: choice.num_chosen]
        np.testing.assert_array_equal(np.sort(np.array(experts)[row, 0]), np.sort(largest))
        own = share[row][np.array(experts)[row, 0]]
        own = own * choice.factor / (own.sum() if choice.normed else 1.0)
        np.testing.assert_allclose(np.array(weights)[row, 0], own, rtol=1e-5)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("size", [64, 288])
def test_experts_are_added_up_and_activated(dtype: mx.Dtype, size: int) -> None:
    """As gpt-oss does it: with a bias for each expert, and clipped."""
    rng = np.random.default_rng(size)
    shape, num_experts = (2, 3, 4), 7

    def draw(*extents: int) -> tuple[mx.array, np.ndarray]:
        drawn = mx.array(3 * rng.normal(size=extents)).astype(dtype)
        return drawn, np.array(drawn.astype(F32)).astype(np.float64)

    experts = rng.integers(0, num_experts, shape)
    at = mx.array(experts).astype(mx.uint32)
    (results, r), (weights, w), (bias, b) = draw(*shape, size), draw(*shape), draw(7, size)
    (both, wide), (double, d) = draw(*shape, 1, 2 * size), draw(num_experts, 2 * size)
    beside, own = draw(*shape[:-1], size)
    x, gate = np.split(wide + d[experts][..., None, :], 2, axis=-1)
    x, gate = np.clip(x, -7, 7), np.minimum(gate, 7)
    found = (
        (added_up(results, weights), (r * w[..., None]).sum(axis=-2)),
        (added_up(results, weights, beside=beside), (r * w[..., None]).sum(axis=-2) + own),
        (added_up(results, weights, bias, at), ((r + b[experts]) * w[..., None]).sum(axis=-2)),
        (
            biased_swiglu(both, double, at, alpha=1.702, limit=7.0),
            (x + 1) * gate / (1 + np.exp(-1.702 * gate)),
        ),
    )
    rtol = {F32: 1e-5, F16: 1e-3, BF16: 8e-3}[dtype]
    for ours, plain in found:
        atol = rtol * np.abs(plain).max()
        np.testing.assert_allclose(np.array(ours.astype(F32)), plain, atol=atol)


def test_what_is_no_number_stays_none() -> None:
    """A clip would hide it."""
    none = mx.full((1, 1, 1, 64), float("nan"))
    bias, at = mx.zeros((2, 64)), mx.zeros((1, 1), mx.uint32)
    found = biased_swiglu(none, bias, at, alpha=1.702, limit=7.0)
    assert mx.isnan(found).all().item()


FAMILIES = ["qwen3_next", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "in groups", "glm4_moe"]


IN_GROUPS = CONFIGS["deepseek_v3"] | {"n_routed_experts": 16, "num_experts_per_tok": 3}


IN_GROUPS |= {"n_group": 4, "topk_group": 2}


def built(family: str) -> Any:
    return build_from({**CONFIGS, **EVERY, "in groups": IN_GROUPS}[family])


@cases("quantized", [False, True])
@cases("family", FAMILIES)
def test_a_layer_computes_what_it_did(family: str, quantized: bool) -> None:
    """Of 40 tokens mlx-lm sorts the experts; 70 are too many for the kernels."""
    model = built(family)
    layer: Any = next(part for _, part in model.named_modules() if type(part) in OURS)
    if quantized:
        nn.quantize(layer, 32, 4)
    given = [mx.random.normal((n, 1, 64), key=mx.random.key(1)) for n in (3, 40, 70)]
    expected = [layer(x) for x in given]
    before = dict(tree_flatten(layer.parameters()))
    stack_experts(model)
    use_expert_kernels(model)
    assert type(layer) in OURS.values()
    (glu,) = (part for _, part in layer.named_modules() if type(part) is StackedGLU)
    assert glu.has_shared is (family != "gpt_oss")
    for x, plain in zip(given, expected, strict=True):
        assert mx.allclose(layer(x), plain, atol=1e-5 * float(mx.abs(plain).max())).item()
    after = dict(tree_flatten(layer.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def test_a_shared_expert_unlike_the_others_stays_beside_them() -> None:
    model = built("qwen3_next")
    layer: Any = next(part for _, part in model.named_modules() if type(part) in OURS)
    nn.quantize(layer.shared_expert, 32, 8)
    x = mx.random.normal((3, 1, 64), key=mx.random.key(1))
    expected = layer(x)
    stack_experts(model)
    use_expert_kernels(model)
    assert not layer.switch_mlp.has_shared
    assert mx.allclose(layer(x), expected, atol=1e-5 * float(mx.abs(expected).max())).item()


@cases("mode", ["affine", "mxfp4"])
@cases("num_tokens", [3, 40])
@cases("bias", [False, True])
def test_stacked_experts_compute_what_they_did(bias: bool, num_tokens: int, mode: str) -> None:
    plain = SwitchGLU(64, 96, 5, bias=bias)
    plain.update(tree_map(lambda a: mx.random.normal(a.shape, key=mx.random.key(a.size)), plain))
    nn.quantize(plain, 32, 4, mode=mode)
    x = mx.random.normal((num_tokens, 64), key=mx.random.key(0))
    chosen = mx.random.randint(0, 5, (num_tokens, 2), key=mx.random.key(1))
    expected = plain(x, chosen)
    before = dict(tree_flatten(plain.parameters()))
    stack_experts(plain)
    assert type(plain) is StackedGLU
    assert mx.allclose(plain(x, chosen), expected, rtol=1e-5, atol=1e-4).item()
    after = dict(tree_flatten(plain.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("module", "name", "right", "wrong", "family"),
    [
        (experts, "SOURCE", "own /= total", "own *= total", "gpt_oss"),
        (experts, "SOURCE", "own /= total", "own *= total", "deepseek_v3"),
        (experts, "SOURCE", "num_below < Dropped", "num_below < 0", "in groups"),
        (experts, "ADD_UP", "sum +=", "sum =", "deepseek_v3"),
        (experts, "ADD_UP", "result +=", "result -=", "gpt_oss"),
        (experts, "ACTIVATE", "x + 1.0f", "x", "gpt_oss"),
    ],
)
def test_layers_stay_as_they_are_where_a_kernel_is_off(
    module: Any,
    name: str,
    right: str,
    wrong: str,
    family: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = getattr(module, name)
    assert right in source
    for broken in (source.replace(right, wrong), "no Metal"):
        monkeypatch.setattr(module, name, broken)
        model = built(family)
        use_expert_kernels(model)
        assert not any(type(part) in OURS.values() for _, part in model.named_modules())
        assert "experts are chosen by mlx-lm" in caplog.text
        caplog.clear()


F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


TOLERANCES = {F32: 3e-6, F16: 1e-3, BF16: 8e-3}  # of the largest number


SMALL: tuple[tuple[int, int], tuple[int, int]] = (1, 2), (64, 32)


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


def drawn_inputs(layer: Any, rows: int, dtype: mx.Dtype) -> tuple[mx.array, list[mx.array]]:
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
    wide, entries = drawn_inputs(layer, rows, dtype)
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
    step(layer, *drawn_inputs(layer, 2, F32))
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
    wide, entries = drawn_inputs(layer, 1, F32)
    step(layer, mx.repeat(wide, 2, axis=1), entries)
    with tap_states():
        step(layer, wide, entries)


def test_lanes_keep_a_bounded_part_of_the_state() -> None:
    assert num_simd_groups(128, 128) == 16
    assert num_simd_groups(256, 256) is None  # 128 numbers a lane
    assert num_simd_groups(48, 64) is None  # no multiple of the lanes
