"""Which calls mlx-lm's kernels get, and that its functions give states at every 64 tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.cache import make_prompt_cache

from families import build
from pippin.backends.mlx import load
from pippin.backends.mlx.cpu.operations import without_operations
from pippin.backends.mlx.recurrent import recurrences
from pippin.backends.mlx.recurrent.recurrences import gated_delta_update, ssm_update
from pippin.backends.mlx.recurrent.taps import BlockStates, tap_states

FAMILIES = ["qwen3_5", "mamba2", "nemotron_h"]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which functions of mlx-lm were asked, in order, on what counts as Metal."""
    asked: list[str] = []
    for family in FAMILIES:
        build(family)  # its module has the functions as they are by then

    def noted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return original(*args, **options)

        return note

    for module, name in ((gated_delta, "gated_delta_update"), (ssm, "ssm_update")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(recurrences, "on_metal", lambda: True)
    return asked


def run_gated_delta(num_tokens: int = 1, key_dim: int = 64, **more: Any) -> None:
    def per_token(*shape: int) -> mx.array:
        return mx.zeros((1, num_tokens, *shape))

    args = (per_token(2, key_dim), per_token(2, key_dim), per_token(4, 16), per_token(4))
    gated_delta_update(*args, per_token(4), mx.zeros(4), mx.zeros(4), **more)


def run_ssm(num_tokens: int = 1, state_dim: int = 128, **more: Any) -> None:
    heads, groups = mx.zeros((1, num_tokens, 4, 8)), mx.zeros((1, num_tokens, 2, state_dim))
    steps = mx.zeros((1, num_tokens, 4))
    args = (heads, mx.zeros(4), groups, groups, mx.zeros(4), steps, mx.zeros(4))
    ssm_update(*args, **more)


def test_a_gated_delta_kernel_takes_any_tokens_and_keys_of_whole_simd_groups(
    theirs: list[str],
) -> None:
    run_gated_delta()
    run_gated_delta(num_tokens=9, mask=mx.ones((1, 9)))
    assert len(theirs) == 2
    run_gated_delta(key_dim=48)
    run_gated_delta(use_kernel=False)
    assert len(theirs) == 2


def test_mamba_s_kernel_takes_one_token_of_each_row_and_no_padding(theirs: list[str]) -> None:
    run_ssm()
    assert len(theirs) == 1
    run_ssm(num_tokens=2)
    run_ssm(state_dim=16)
    run_ssm(mask=mx.ones((1, 1)))
    run_ssm(lengths=mx.ones(1))
    run_ssm(use_kernel=False)
    assert len(theirs) == 1


@pytest.fixture
def no_operations() -> Iterator[None]:
    """As on a GPU, where a layer calls its recurrence."""
    with without_operations():
        yield


def states_recorded(loaded: load.LoadedModel, tokens: mx.array) -> list[BlockStates]:
    with tap_states() as taps:
        loaded.forward(tokens, make_prompt_cache(loaded.model))
    return taps.states


@pytest.mark.usefixtures("no_operations")
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_the_same_whoever_computes_them(
    family: str, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every 64 tokens, in prefill and decode."""
    monkeypatch.setattr(recurrences, "SIMD_WIDTH", 1)
    of_chunks = family == "qwen3_5"  # the other kernel takes one token
    tokens = mx.array(np.random.default_rng(0).integers(0, 256, (1, 150)), dtype=mx.int32)
    model, _ = build(family)
    logits = model(tokens, cache=make_prompt_cache(model))
    loaded = load.prepare(*build(family))
    assert loaded.state_taps
    recorded = []
    for metal in (False, True):
        monkeypatch.setattr(recurrences, "on_metal", lambda metal=metal: metal)
        for num_tokens in (150, 1):
            theirs.clear()
            layers = states_recorded(loaded, tokens[:, :num_tokens])
            assert bool(theirs) is (metal and (of_chunks or num_tokens == 1))
            assert {len(states) for states in layers} == {3 if num_tokens == 150 else 1}
            recorded.append(layers)
        ours = loaded.forward(tokens, make_prompt_cache(loaded.model))
        assert mx.abs(ours - logits).max().item() < 1e-3
    for a, b in zip(recorded[:2], recorded[2:], strict=True):
        for one, other in zip(a, b, strict=True):
            for n in range(len(one)):
                assert mx.abs(one[n] - other[n]).max().item() < 1e-4


@pytest.mark.usefixtures("no_operations")
@pytest.mark.parametrize("family", ["qwen3_5", "mamba2"])
def test_safe_has_none_of_their_kernels(
    family: str, theirs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrences, "SIMD_WIDTH", 1)
    for safe in (True, False):
        loaded = load.prepare(*build(family), safe=safe)
        theirs.clear()
        loaded.forward(mx.zeros((1, 1), mx.int32), make_prompt_cache(loaded.model))
        assert bool(theirs) is not safe
