"""What the layers of each family keep, as read from mlx-lm's own caches."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import qwen3
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from cases import cases
from families import FAMILIES, LLAMA_DYNAMIC, WINDOW, build, build_from
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.load import prepare
from pippin.errors import UnsupportedLayout
from pippin.types import Component

ATTENTION, WINDOWED, STATE = Component.ATTENTION, Component.WINDOW, Component.STATE
HYBRID = [STATE, ATTENTION, STATE]

KINDS = {
    "qwen3_5": HYBRID,
    "qwen3_next": HYBRID,
    "qwen3": [ATTENTION, ATTENTION],
    "qwen3-4bit": [ATTENTION, ATTENTION],
    "llama": [ATTENTION, ATTENTION],
    "gpt_oss": [WINDOWED, ATTENTION],
    "gemma2": [ATTENTION, ATTENTION],
    "gemma3": [WINDOWED, ATTENTION, WINDOWED],
    "gemma4": [WINDOWED, ATTENTION],  # its other two layers borrow their KV
    "gemma3n": [WINDOWED, ATTENTION] * 2,  # likewise
    "llama4": [WINDOWED] * 3 + [ATTENTION],
    "mamba2": [STATE, STATE],
    "falcon_h1": [STATE, ATTENTION, STATE, ATTENTION],
    "nemotron_h": [STATE, STATE, ATTENTION],
    "lfm2": [STATE, ATTENTION, STATE, ATTENTION],
    "deepseek_v3": [ATTENTION, ATTENTION],
    "deepseek_v32": [ATTENTION] * 4,  # latents, and the keys of an indexer
    "kimi_linear": HYBRID,
    "olmo_hybrid": HYBRID,
}


@cache
def layout_of(family: str) -> Layout:
    return prepare(*build(family)).layout


@cases("family", FAMILIES)
def test_every_layer_keeps_what_its_own_cache_says(family: str) -> None:
    caches = layout_of(family).caches
    assert [cache.component for cache in caches] == KINDS[family]
    windows = {cache.window for cache in caches if cache.component is WINDOWED}
    assert windows <= {WINDOW}
    assert all(cache.window is None for cache in caches if cache.component is not WINDOWED)


def test_a_layer_of_several_caches_has_a_leaf_for_each() -> None:
    layout = layout_of("falcon_h1")
    assert [cache.layer for cache in layout.caches] == [0, 0, 1, 1]
    first, second = layout.nest(["a", "b", "c", "d"])
    assert (first[0], first[1], second[0], second[1]) == ("a", "b", "c", "d")


def test_shapes_are_those_of_one_token_or_one_sequence() -> None:
    state, attention, _ = layout_of("qwen3_5").caches
    assert state.shapes == ((3, 128), (4, 16, 16))  # convolution inputs, recurrent state
    assert attention.shapes == ((2, 16), (2, 16))
    assert state.nbytes == 4 * (3 * 128 + 4 * 16 * 16)
    assert attention.nbytes == 4 * (2 * 16 + 2 * 16)
    latent, _ = layout_of("deepseek_v3").caches
    assert latent.shapes == ((1, 32), (1, 8))  # compressed KV, and the rotated part of the keys


@cases("family", FAMILIES)
def test_shapes_agree_with_what_mlx_lm_fills_its_caches_with(family: str) -> None:
    model, _ = build(family)
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 3), dtype=mx.int32), cache=caches)
    flat = [inner for outer in caches for inner in getattr(outer, "caches", [outer])]
    for ours, stock in zip(layout_of(family).caches, flat, strict=True):
        if ours.is_state:
            held = [(entry.shape[1:], entry.dtype) for entry in stock.cache]
        else:
            indexer = ours.shapes[1][-1] == 0  # its values are its keys, or zeros, and never read
            pair = (stock.keys, stock.keys[..., :0] if indexer else stock.values)
            held = [((side.shape[1], side.shape[3]), side.dtype) for side in pair]
        assert list(zip(ours.shapes, ours.dtypes, strict=True)) == held


LATENT = ("deepseek_v3", "kimi_linear")
JOINED = ("gemma2", "deepseek_v32")  # scores are made in its own way; an indexer chooses among them


@cases("family", FAMILIES)
def test_main_and_tail_are_joined_only_where_layers_attend_in_their_own_way(family: str) -> None:
    reads = {cache.reads for cache in layout_of(family).caches if not cache.is_state}
    own = Reads.JOINED if family in JOINED else Reads.PIECES
    assert reads <= {Reads.LATENT if family in LATENT else own}


@cases("family", FAMILIES)
def test_layers_that_take_padding_for_tokens_are_found_out(family: str) -> None:
    """olmo_hybrid's convolutions keep the end of the padded row, whatever its length."""
    assert layout_of(family).pads == (family != "olmo_hybrid")


def test_a_model_that_drops_its_mask_is_refused_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one token in a plain cache it needs none; in a batch it would see padding."""
    monkeypatch.setattr(qwen3, "create_attention_mask", lambda *_, **__: None)
    with pytest.raises(UnsupportedLayout, match="the mask of that cache"):
        prepare(*build("qwen3"))


def test_a_family_that_cannot_be_served_is_named() -> None:
    with pytest.raises(UnsupportedLayout, match=r"llama models .* different lengths"):
        prepare(build_from(LLAMA_DYNAMIC), LLAMA_DYNAMIC)


def test_a_chunked_cache_is_a_window_that_does_not_slide() -> None:
    assert [cache.chunked for cache in layout_of("llama4").caches] == [True] * 3 + [False]
    assert not layout_of("llama4").packs  # kernels know sliding windows alone


class WithCaches(nn.Module):
    """A model that keeps other caches than its family does."""

    def __init__(self, *caches: Any) -> None:
        super().__init__()
        self.inner, _ = build("qwen3")
        self.make_cache = lambda: list(caches)

    @property
    def layers(self) -> list[nn.Module]:
        return self.inner.layers  # type: ignore[no-any-return]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.inner(inputs, cache=cache)  # type: ignore[no-any-return]


def test_a_window_that_keeps_first_tokens_is_refused_by_name() -> None:
    model = WithCaches(KVCache(), RotatingKVCache(max_size=64, keep=4))
    with pytest.raises(UnsupportedLayout, match="RotatingKVCache that keeps its first 4 tokens"):
        prepare(model, {})


def test_a_cache_that_no_layer_uses_is_refused() -> None:
    model = WithCaches(KVCache(), KVCache(), KVCache())
    with pytest.raises(UnsupportedLayout, match="layer 2 does not use the KV cache it declares"):
        prepare(model, {})


def test_a_subclass_of_a_known_cache_is_not_taken_for_it() -> None:
    class OddCache(KVCache):
        pass

    model = WithCaches(KVCache(), OddCache())
    with pytest.raises(UnsupportedLayout, match="layer 1 keeps a OddCache"):
        prepare(model, {})
