"""Attention in blocks of queries is the same attention, and its scores keep to their limit."""

from __future__ import annotations

import platform
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx import substitutions
from pippin.backends.mlx.backend import ACTIVATION_SHARE, MLXBackend
from pippin.backends.mlx.prefill import query_blocks
from pippin.backends.mlx.prefill.query_blocks import ScoreLimit
from reference import assert_right
from serving import make_client, make_prompt, served

HEADS, KV_HEADS, DIM = 4, 2, 16
NUM_QUERIES, NUM_KEYS = 100, 170
QUERY_BYTES = 2 * HEADS * NUM_KEYS * 4


class Attention:
    """mlx's own, on a device with fused kernels (`fused`) or without; notes its calls."""

    def __init__(self, *, fused: bool, sinks: mx.array | None = None) -> None:
        self.calls: list[tuple[int, int]] = []  # queries and keys of each
        self._fused = fused
        self._whole = partial(mx.fast.scaled_dot_product_attention, scale=0.3, sinks=sinks)

    def __call__(self, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        if options.pop("force_fused", False) and not self._fused:
            raise ValueError("no fused kernel is available")
        self.calls.append((q.shape[2], k.shape[2]))
        return self._whole(q, k, v, **options)


@pytest.fixture
def inputs() -> tuple[mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(0)
    shapes = ((2, HEADS, NUM_QUERIES), (2, KV_HEADS, NUM_KEYS), (2, KV_HEADS, NUM_KEYS))
    q, k, v = (mx.array(rng.normal(size=(*shape, DIM)).astype(np.float32)) for shape in shapes)
    return q, k, v


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(query_blocks, "LIMIT", ScoreLimit(num_bytes))


MASKS = {
    "none": None,
    "causal": "causal",
    "bool": mx.array(np.random.default_rng(1).random((2, 1, NUM_QUERIES, NUM_KEYS)) < 0.7),
    "added": mx.array(
        np.random.default_rng(2).normal(size=(2, HEADS, NUM_QUERIES, NUM_KEYS)).astype(np.float32)
    ),
    "for all queries": mx.array(np.random.default_rng(3).random((2, 1, 1, NUM_KEYS)) < 0.7),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_blocks_are_the_whole(
    inputs: Any, mask: str, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = Attention(fused=False, sinks=mx.ones(HEADS) if with_sinks else None)
    whole = query_blocks.attend(attention, *inputs, MASKS[mask])
    limit(monkeypatch, 70 * QUERY_BYTES)
    blocks = query_blocks.attend(attention, *inputs, MASKS[mask])
    np.testing.assert_allclose(np.array(blocks), np.array(whole), rtol=0, atol=1e-5)
    last_keys = NUM_KEYS - NUM_QUERIES + 64 if mask == "causal" else NUM_KEYS
    assert attention.calls == [(100, NUM_KEYS), (64, last_keys), (36, NUM_KEYS)]


def test_a_fused_kernel_takes_all_queries(inputs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 1)
    attention = Attention(fused=True)
    query_blocks.attend(attention, *inputs, "causal")
    assert attention.calls == [(NUM_QUERIES, NUM_KEYS)]


@pytest.mark.parametrize(("dim", "num_calls"), [(128, 1), (256, 4)])
def test_metal_takes_blocks_where_its_fused_kernel_is_slow(
    dim: int, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, 1)
    monkeypatch.setattr(query_blocks, "on_metal", lambda: True)
    attention = Attention(fused=True)
    x = mx.zeros((1, 1, NUM_QUERIES, dim))
    query_blocks.attend(attention, x, x, x, "causal")
    assert len(attention.calls) == num_calls


@pytest.mark.parametrize(
    ("architecture", "macos", "num_queries", "dim", "mask", "dtype", "fused"),
    [
        ("applegpu_g17s", "26.2", 1024, 256, "causal", mx.bfloat16, True),
        ("applegpu_g17d", "27.0", 2048, 256, "causal", mx.float16, True),
        ("applegpu_g17s", "26.1", 1024, 256, "causal", mx.bfloat16, False),
        ("applegpu_g16s", "26.2", 1024, 256, "causal", mx.bfloat16, False),
        ("applegpu_g17p", "26.2", 1024, 256, "causal", mx.bfloat16, False),
        ("applegpu_g18p", "26.2", 1024, 256, "causal", mx.bfloat16, True),
        ("applegpu_g17s", "26.2", 1023, 256, "causal", mx.bfloat16, False),
        ("applegpu_g17s", "26.2", 1024, 192, "causal", mx.bfloat16, False),
        ("applegpu_g17s", "26.2", 1024, 256, None, mx.bfloat16, False),
        ("applegpu_g17s", "26.2", 1024, 256, "causal", mx.float32, False),
    ],
)
def test_metal_takes_mlx_s_kernel_for_matrix_units_where_mlx_would(
    architecture: str,
    macos: str,
    num_queries: int,
    dim: int,
    mask: str | None,
    dtype: mx.Dtype,
    fused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, 1)
    monkeypatch.setattr(query_blocks, "on_metal", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: {"architecture": architecture})
    monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), ""))
    seen: list[bool] = []

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        seen.append(options.get("force_fused", False))
        return q

    x = mx.zeros((1, 1, num_queries, dim), dtype)
    query_blocks.attend(attention, x, x, x, mask)
    assert (seen == [True]) == fused


def test_scores_and_their_copies_are_half_of_the_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, 0)
    backend = MLXBackend(served("llama"), num_slots=1)
    for name in ("set_cache_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, lambda _: None)
    backend.limit_memory(backend.memory_used() + (1 << 30))
    assert query_blocks.COPIES * query_blocks.LIMIT.num_bytes <= ACTIVATION_SHARE / 2 * (1 << 30)
    backend.limit_memory(1 << 40)
    assert query_blocks.LIMIT.num_bytes == query_blocks.MOST_BYTES
    backend.limit_memory(0)
    assert query_blocks.LIMIT.num_bytes == query_blocks.LEAST_BYTES


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "deepseek_v3", "qwen3_5"])
def test_a_served_prompt_in_blocks_says_the_same(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every device, with the attention of GPUs."""
    model = served(family)
    limit(monkeypatch, 1)
    plain = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(substitutions.drop_ins, "attention", plain)
    client = make_client(family, model=model, num_slots=3)
    replies = [client.submit(make_prompt(family, n, 0), max_tokens=8) for n in (150, 40, 131)]
    client.run()
    for reply in replies:
        assert_right(family, reply.prompt, reply.tokens)
