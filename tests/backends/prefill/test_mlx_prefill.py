"""Prompts in chunks: which share a forward, and scores of positions and of queries in blocks."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS, build_from
from near_ties import TOLERANCE, log_softmax
from pippin.backends.base import Admit, PrefillRow, StepPlan
from pippin.backends.chunking import group_chunks
from pippin.backends.mlx import substitutions
from pippin.backends.mlx.backend import ACTIVATION_SHARE, MLXBackend
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.prefill import prompt_scores, query_blocks
from pippin.backends.mlx.prefill.prompts import PREFIX_COPIES
from pippin.backends.mlx.prefill.query_blocks import ScoreLimit
from pippin.backends.sampling.rules import SCORED_BYTES, SCORED_POSITIONS, scored_positions
from pippin.backends.sampling.sampler import Logprobs
from pippin.types import SamplingParams, TokenLogprobs
from reference import assert_right
from serving import make_backend, make_client, make_prompt, served

Shape = tuple[int, int]  # where a chunk starts, and its tokens


def chunk(shape: Shape, slot: int = 1) -> PrefillRow:
    return PrefillRow(slot, shape[0], np.zeros(shape[1], np.int32))


def groups(shapes: list[Shape], *, cpu: bool, pads: bool = True, most: int = 1 << 40) -> set[str]:
    found = group_chunks(
        [chunk(shape) for shape in shapes],
        lambda _: False,
        fits=lambda rows, prefix: rows * prefix <= most,
        pads=pads,
        cpu=cpu,
    )
    assert sorted((c.start, len(c.tokens)) for own in found for c in own) == sorted(shapes)
    return {" ".join(f"{c.start}+{len(c.tokens)}" for c in own) for own in found}


@pytest.mark.parametrize(
    ("shapes", "cpu", "expected"),
    [
        # A long prefix beside fresh rows would be padded to by each of them.
        ([(33_000, 512), (0, 512), (0, 512), (0, 512)], False, {"33000+512", "0+512 0+512 0+512"}),
        # A conversation's turns share a forward, as far as their prefixes go.
        ([(33_000, 64), (32_000, 64)], False, {"33000+64 32000+64"}),
        ([(4_000, 64), (1_000, 64)], False, {"4000+64 1000+64"}),
        ([(4_000, 64), (1_000, 64)], True, {"4000+64", "1000+64"}),
        ([(128, 30), (0, 30), (64, 28)], True, {"128+30 0+30 64+28"}),
        # Tokens cost more than columns.
        ([(0, 512), (0, 8)], True, {"0+512", "0+8"}),
        ([(0, 512), (0, 300)], False, {"0+512 0+300"}),
    ],
)
def test_chunks_share_a_forward_where_padding_is_cheaper(
    shapes: list[Shape], cpu: bool, expected: set[str]
) -> None:
    assert groups(shapes, cpu=cpu) == expected


def test_a_model_that_takes_padding_for_tokens_gets_equal_chunks_of_any_prefix() -> None:
    found = groups([(2_000, 5), (0, 3), (1_900, 3), (0, 5)], cpu=False, pads=False)
    assert found == {"2000+5 0+5", "1900+3 0+3"}


def test_prefixes_of_a_group_are_no_longer_than_memory_allows() -> None:
    shapes = [(30_000, 64)] * 5
    assert groups(shapes, cpu=False) == {" ".join(["30000+64"] * 5)}
    found = groups(shapes, cpu=False, most=65_536)
    assert found == {"30000+64 30000+64", "30000+64"}


def test_groups_take_no_more_than_half_of_what_activations_may() -> None:
    backend = make_backend("qwen3", num_slots=3)
    prompts, layout = backend._prompts, backend.loaded.layout
    chunks = [chunk((1_000, 8), slot) for slot in (1, 2, 3)]
    params = SamplingParams()
    for c in chunks:
        backend._slots.admit(Admit(c.slot, params, (), c.tokens, 0))
    assert len(prompts.groups(chunks)) == 1
    of_a_column = max(cache.nbytes for cache in layout.kv_caches)
    prompts.fit(2 * PREFIX_COPIES * 2_500 * of_a_column)
    assert [len(group) for group in prompts.groups(chunks)] == [2, 1]


VOCAB = 20_000


CONFIG = CONFIGS["llama"] | {"vocab_size": VOCAB}


CHUNK = 512  # 41 MB of float32 logits


@cache
def large_vocabulary() -> LoadedModel:
    return prepare(build_from(CONFIG), CONFIG)


def prompt_of(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, num_tokens, dtype=np.int32)


def score(
    *prompts: np.ndarray,
    loaded: LoadedModel | None = None,
    block_bytes: int = SCORED_BYTES,
    top: int = 3,
) -> list[tuple[TokenLogprobs, ...]]:
    """All prompts in one step, each in one chunk."""
    backend = MLXBackend(loaded or large_vocabulary(), num_slots=len(prompts))
    backend._prompts.scores.block_bytes = block_bytes
    params = SamplingParams(prompt_logprobs=top, max_tokens=1)
    admit = tuple(Admit(slot, params, (), tokens, 0) for slot, tokens in enumerate(prompts, 1))
    chunks = tuple(PrefillRow(a.slot, 0, a.prompt, samples=True) for a in admit)
    result = backend.launch(StepPlan(0, admit=admit, prefill=chunks)).wait()
    return [result.prompt_logprobs[a.slot] for a in admit]


def chosen(scored: tuple[TokenLogprobs, ...]) -> list[float]:
    return [entry.logprob for entry in scored]


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the logits that are scored."""
    seen: list[tuple[int, ...]] = []
    plain = prompt_scores.token_logprobs

    def noted(logits: mx.array, tokens: mx.array, k: int) -> Logprobs[mx.array]:
        seen.append(logits.shape)
        return plain(logits, tokens, k)

    monkeypatch.setattr(prompt_scores, "token_logprobs", noted)
    return seen


def test_no_block_has_more_logits_than_its_bytes_allow(shapes: list[tuple[int, ...]]) -> None:
    score(prompt_of(CHUNK), block_bytes=100 * 4 * VOCAB)
    assert shapes == [(100, VOCAB)] * 5 + [(11, VOCAB)]


@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.usefixtures("exact_bytes")
def test_the_peak_is_a_few_blocks_and_not_the_chunk_s_logits(top: int) -> None:
    prompts = [prompt_of(CHUNK, seed) for seed in range(3)]
    score(prompts[0], top=top)  # what is made once
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    score(*prompts, block_bytes=8 * 4 * VOCAB, top=top)
    assert mx.get_peak_memory() - before < len(prompts) * CHUNK * VOCAB * 4 / 5


def test_scores_are_those_of_all_positions_at_once() -> None:
    tokens = prompt_of(200)
    logits = build_from(CONFIG)(mx.array(tokens)[None])[0]
    expected = log_softmax(np.array(logits))[np.arange(199), tokens[1:]]
    (whole,) = score(tokens)
    (blocks,) = score(tokens, block_bytes=7 * 4 * VOCAB)
    for scored in (whole, blocks):
        np.testing.assert_allclose(chosen(scored), expected, rtol=0, atol=TOLERANCE)
    assert [entry.top_ids for entry in blocks] == [entry.top_ids for entry in whole]


def test_a_model_whose_head_is_not_known_is_scored_in_blocks_as_well(
    shapes: list[tuple[int, ...]],
) -> None:
    tokens = prompt_of(40)
    (known,) = score(tokens)
    shapes.clear()
    unknown = replace(large_vocabulary(), hidden_bytes=0)
    (found,) = score(tokens, loaded=unknown, block_bytes=16 * 4 * VOCAB)
    assert shapes == [(16, VOCAB), (16, VOCAB), (7, VOCAB)]
    np.testing.assert_allclose(chosen(found), chosen(known), rtol=0, atol=TOLERANCE)


def test_blocks_fit_what_the_budget_sets_aside_for_activations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of scores and of queries."""
    backend = MLXBackend(large_vocabulary(), num_slots=1)
    monkeypatch.setattr(query_blocks, "LIMIT", query_blocks.ScoreLimit(0))
    for name in ("set_cache_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, lambda _: None)
    scores, used = backend._prompts.scores, backend.memory_used()
    backend.limit_memory(used + (1 << 30))
    aside = ACTIVATION_SHARE * (1 << 30)
    assert prompt_scores.LEAST_BYTES < scores.block_bytes <= aside / 2 / prompt_scores.ALIVE
    assert query_blocks.COPIES * query_blocks.LIMIT.num_bytes <= aside / 2
    for budget, of_scores, of_queries in (
        (1 << 40, SCORED_BYTES, query_blocks.MOST_BYTES),
        (0, prompt_scores.LEAST_BYTES, query_blocks.LEAST_BYTES),
    ):
        backend.limit_memory(budget)
        assert (scores.block_bytes, query_blocks.LIMIT.num_bytes) == (of_scores, of_queries)


@pytest.mark.parametrize(
    ("vocab_size", "block_bytes", "positions"),
    [(250_000, SCORED_BYTES, 67), (32_000, SCORED_BYTES, SCORED_POSITIONS), (10**6, 1 << 20, 1)],
)
def test_positions_at_a_time_follow_the_vocabulary(
    vocab_size: int, block_bytes: int, positions: int
) -> None:
    assert scored_positions(vocab_size, block_bytes) == positions


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
    ("changed", "fused"),
    [
        ({}, True),
        ({"architecture": "applegpu_g17d", "macos": "27.0", "dtype": mx.float16}, True),
        ({"architecture": "applegpu_g18p"}, True),
        ({"macos": "26.1"}, False),
        ({"architecture": "applegpu_g16s"}, False),
        ({"architecture": "applegpu_g17p"}, False),
        ({"num_queries": 1023}, False),
        ({"dim": 192}, False),
        ({"mask": None}, False),
        ({"dtype": mx.float32}, False),
    ],
)
def test_metal_takes_mlx_s_kernel_for_matrix_units_where_mlx_would(
    changed: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"architecture": "applegpu_g17s", "macos": "26.2", "mask": "causal"}
    given |= {"num_queries": 1024, "dim": 256, "dtype": mx.bfloat16} | changed
    limit(monkeypatch, 1)
    monkeypatch.setattr(query_blocks, "on_metal", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda _: given)
    monkeypatch.setattr(platform, "mac_ver", lambda: (given["macos"], ("", "", ""), ""))
    seen: list[bool] = []

    def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        seen.append(options.get("force_fused", False))
        return q

    x = mx.zeros((1, 1, given["num_queries"], given["dim"]), given["dtype"])
    query_blocks.attend(attention, x, x, x, given["mask"])
    assert (seen == [True]) == fused


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
