"""Which calls mlx-lm's kernels get, and that its functions give states at every 64 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from families import build
from pippin.backends.mlx import load, substitutions
from pippin.backends.mlx.cpu.operations.bindings import without_operations
from pippin.backends.mlx.recurrent import mlx_lm_kernels
from pippin.backends.mlx.recurrent.mlx_lm_kernels import Call, run_in_slices
from pippin.backends.mlx.recurrent.taps import LayerStates, tap_block_states


def gated_delta_call(num_tokens: int = 1, key_dim: int = 64, **more: Any) -> Call:
    def per_token(*shape: int) -> mx.array:
        return mx.zeros((1, num_tokens, *shape))

    args = (per_token(2, key_dim), per_token(2, key_dim), per_token(4, 16), per_token(4))
    return Call.of("gated_delta_update", (*args, per_token(4), mx.zeros(4), mx.zeros(4)), more)


def ssm_call(num_tokens: int = 1, state_dim: int = 128, **more: Any) -> Call:
    heads, groups = mx.zeros((1, num_tokens, 4, 8)), mx.zeros((1, num_tokens, 2, state_dim))
    steps = mx.zeros((1, num_tokens, 4))
    args = (heads, mx.zeros(4), groups, groups, mx.zeros(4), steps, mx.zeros(4))
    return Call.of("ssm_update", args, more)


def test_a_gated_delta_kernel_takes_any_tokens_and_keys_of_whole_simd_groups() -> None:
    assert gated_delta_call().has_kernel
    assert gated_delta_call(num_tokens=9, mask=mx.ones((1, 9))).has_kernel
    assert not gated_delta_call(key_dim=48).has_kernel
    assert not gated_delta_call(use_kernel=False).has_kernel


def test_mamba_s_kernel_takes_one_token_of_each_row_and_no_padding() -> None:
    assert ssm_call().has_kernel
    assert not ssm_call(num_tokens=2).has_kernel
    assert not ssm_call(state_dim=16).has_kernel
    assert not ssm_call(mask=mx.ones((1, 1))).has_kernel
    assert not ssm_call(lengths=mx.ones(1)).has_kernel


@pytest.fixture
def no_operations() -> Iterator[None]:
    """As on a GPU, where a layer calls its recurrence."""
    with without_operations():
        yield


def states_recorded(loaded: load.LoadedModel, tokens: mx.array) -> LayerStates:
    with tap_block_states() as layers:
        loaded.forward(tokens, make_prompt_cache(loaded.model))
    return layers


@pytest.mark.usefixtures("no_operations")
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2", "nemotron_h"])
def test_states_are_the_same_whoever_computes_them(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every 64 tokens, in prefill and decode."""
    theirs: list[str] = []

    def note(function: Callable[..., Any], call: Call) -> Any:
        theirs.append(call.function)
        return run_in_slices(function, call)

    monkeypatch.setattr(substitutions, "run_in_slices", note)
    tokens = mx.array(np.random.default_rng(0).integers(0, 256, (1, 150)), dtype=mx.int32)
    model, _ = build(family)
    logits = model(tokens, cache=make_prompt_cache(model))
    loaded = load.prepare(*build(family))
    assert loaded.state_taps
    recorded = []
    for metal in (False, True):
        monkeypatch.setattr(mlx_lm_kernels, "on_metal", lambda metal=metal: metal)
        monkeypatch.setattr(Call, "has_kernel", True)
        for num_tokens in (150, 1):
            theirs.clear()
            layers = states_recorded(loaded, tokens[:, :num_tokens])
            assert bool(theirs) is metal
            assert {len(states) for states in layers} == {3 if num_tokens == 150 else 1}
            recorded.append(layers)
        ours = loaded.forward(tokens, make_prompt_cache(loaded.model))
        assert mx.abs(ours - logits).max().item() < 1e-3
    for a, b in zip(recorded[:2], recorded[2:], strict=True):
        for one, other in zip(a, b, strict=True):
            for n in range(len(one)):
                assert mx.abs(one[n] - other[n]).max().item() < 1e-4


@pytest.mark.usefixtures("no_operations")
def test_safe_has_none_of_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load.prepare(*build("qwen3_5"), safe=True)
    monkeypatch.setattr(mlx_lm_kernels, "on_metal", lambda: True)
    monkeypatch.setattr(Call, "has_kernel", True)
    monkeypatch.setattr(substitutions, "run_in_slices", lambda *_: pytest.fail("theirs"))
    loaded.forward(mx.zeros((1, 3), mx.int32), make_prompt_cache(loaded.model))
