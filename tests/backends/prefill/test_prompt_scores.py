"""Prompts are scored in blocks of positions: few logits are alive at once; scores are the same."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from families import CONFIGS, build_from
from near_ties import TOLERANCE, log_softmax
from pippin.backends.base import Admit, PrefillRow, StepPlan
from pippin.backends.mlx.backend import ACTIVATION_SHARE, MLXBackend
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.prefill import prompt_scores, query_blocks
from pippin.backends.sampling.rules import SCORED_BYTES, SCORED_POSITIONS, scored_positions
from pippin.backends.sampling.sampler import Logprobs
from pippin.types import SamplingParams, TokenLogprobs

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
    backend = MLXBackend(large_vocabulary(), num_slots=1)
    monkeypatch.setattr(query_blocks.LIMIT, "num_bytes", query_blocks.LIMIT.num_bytes)
    for name in ("set_cache_limit", "set_memory_limit"):
        monkeypatch.setattr(mx, name, lambda _: None)
    scores, used = backend._prompts.scores, backend.memory_used()
    backend.limit_memory(used + (1 << 30))
    aside = ACTIVATION_SHARE * (1 << 30)
    assert prompt_scores.LEAST_BYTES < scores.block_bytes <= aside / 2 / prompt_scores.ALIVE
    backend.limit_memory(1 << 40)
    assert scores.block_bytes == SCORED_BYTES
    backend.limit_memory(0)
    assert scores.block_bytes == prompt_scores.LEAST_BYTES


@pytest.mark.parametrize(
    ("vocab_size", "block_bytes", "positions"),
    [(250_000, SCORED_BYTES, 67), (32_000, SCORED_BYTES, SCORED_POSITIONS), (10**6, 1 << 20, 1)],
)
def test_positions_at_a_time_follow_the_vocabulary(
    vocab_size: int, block_bytes: int, positions: int
) -> None:
    assert scored_positions(vocab_size, block_bytes) == positions
