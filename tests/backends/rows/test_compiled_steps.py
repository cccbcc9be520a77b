"""A compiled decode step gives what the plain one gives, as rows join, are flushed and leave.

Rows are given the same tokens whatever they would have said, so that the logits of all steps can
be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import numpy as np
import pytest

from families import VOCAB
from near_ties import TOLERANCE, log_softmax
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows import mains, memory
from pippin.backends.mlx.rows.decode_forward import MAX_COMPILED, DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.rows.mains import read_spans
from serving import served

pytestmark = pytest.mark.slow

HYBRID = "qwen3_5"


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few steps cross a flush."""
    monkeypatch.setattr(memory, "TAIL", 16)


def make_forward(*, compiled: bool) -> DecodeForward:
    loaded = served(HYBRID)
    return DecodeForward(loaded.layout, loaded.forward, compiled=compiled)


def make_tokens(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, VOCAB, num_tokens).astype(np.int32)


def prefilled(tokens: np.ndarray) -> PromptState:
    loaded, prompt = served(HYBRID), PromptState()
    batch = ChunkBatch(loaded.layout, [tokens], [prompt])
    loaded.forward(batch.tokens, batch.caches)
    batch.advance()
    mx.eval(prompt.arrays())
    return prompt


def give(by_slot: np.ndarray, slots: np.ndarray) -> mx.array:
    return mx.array(by_slot[slots])


def run(rows: DecodeRows, forward: DecodeForward, steps: Sequence[int]) -> list[np.ndarray]:
    """Log probabilities [rows, vocab] of each step, in order of slots."""
    found = []
    for step in steps:
        given = partial(give, make_tokens(10, seed=step))
        at, logits = rows.advance(list(rows.rows), given, forward)
        logprobs = log_softmax(np.array(logits))
        found.append(np.stack([logprobs[at.tolist().index(slot)] for slot in sorted(rows.rows)]))
    return found


def play(forward: DecodeForward) -> list[np.ndarray]:
    """What each step gives: of one row, then of two, then of the second alone."""
    rows = DecodeRows(served(HYBRID).layout)
    rows.join([(1, prefilled(make_tokens(64, 1)))])
    found = run(rows, forward, range(6))
    rows.join([(2, prefilled(make_tokens(33, 2)))])
    found += run(rows, forward, range(6, 28))
    rows.leave(1)
    return found + run(rows, forward, range(28, 34))


def assert_same_steps(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=TOLERANCE, err_msg=f"step {step}")


@pytest.mark.usefixtures("way")
def test_compiled_steps_give_what_plain_ones_give() -> None:
    plain, compiled = make_forward(compiled=False), make_forward(compiled=True)
    assert_same_steps(play(compiled), play(plain))
    assert 2 <= len(compiled._compiled) <= MAX_COMPILED
    assert not plain._compiled


def test_only_so_many_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.backends.mlx.rows.decode_forward.MAX_COMPILED", 1)
    compiled = make_forward(compiled=True)
    play(compiled)
    assert len(compiled._compiled) == 1


@pytest.mark.usefixtures("table")
def test_compiled_steps_of_rows_that_share_give_what_plain_ones_apart_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 0)
    tokens = make_tokens(150, 3)
    prompts = {slot: tokens[: 150 - slot] for slot in (1, 2, 3)}
    compiled, plain = make_forward(compiled=True), make_forward(compiled=False)
    found = []
    for forward, shares in ((compiled, True), (plain, False)):
        rows = DecodeRows(served(HYBRID).layout)
        states = [(slot, prefilled(ids)) for slot, ids in prompts.items()]
        rows.join(states, prompts if shares else None)
        found.append(run(rows, forward, range(12)))
        (own,) = rows.mains._classes
        together = [span.num_columns for span in read_spans(own) if len(span.rows) > 1]
        assert sum(together) == (148 if shares else 0)
    assert_same_steps(*found)
    assert len(compiled._compiled) == 1, "one for all that three rows hold"
