"""A compiled decode step gives what the plain one gives, as rows join, are flushed and leave."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import pippin
from pippin.backends.mlx.cpu.compiler import compile_available
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows.decode_forward import MAX_COMPILED, DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows

MODEL = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"

pytestmark = pytest.mark.skipif(
    not compile_available().available, reason=f"no compiler: {compile_available().reason}"
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


def prompt_of(loaded: LoadedModel, num_tokens: int, seed: int) -> PromptState:
    ids = np.random.default_rng(seed).integers(10, 8000, num_tokens).astype(np.int32)
    return prefilled(loaded, ids)


def prefilled(loaded: LoadedModel, ids: np.ndarray) -> PromptState:
    prompt = PromptState()
    batch = ChunkBatch(loaded.layout, [ids], [prompt])
    loaded.forward(batch.tokens, batch.caches)
    batch.advance()
    mx.eval(prompt.arrays())
    return prompt


def step(rows: DecodeRows, current: dict[int, int], forward: DecodeForward) -> dict[int, int]:
    """One greedy token of every row; `current` holds each slot's last."""
    at, logits = rows.advance(
        list(rows.rows),
        lambda at: mx.array([current.get(int(s), 0) for s in at], dtype=mx.int32),
        forward,
    )
    drawn = np.asarray(mx.argmax(logits, axis=-1))
    current.update({int(s): int(t) for s, t in zip(at, drawn, strict=True) if s})
    return dict(current)


def play(loaded: LoadedModel, forward: DecodeForward) -> list[dict[int, int]]:
    """Greedy tokens by slot of each step: one row, then two, then the first leaves."""
    rows = DecodeRows(loaded.layout)
    current: dict[int, int] = {}
    said: list[dict[int, int]] = []

    def run(num_steps: int) -> None:
        said.extend(step(rows, current, forward) for _ in range(num_steps))

    rows.join([(1, prompt_of(loaded, 64, 1))])
    run(6)
    rows.join([(2, prompt_of(loaded, 33, 2))])
    run(70)
    rows.leave(1)
    run(10)
    return said


def test_compiled_steps_say_what_plain_ones_say(loaded: LoadedModel) -> None:
    plain = DecodeForward(loaded.layout, loaded.forward)
    compiled = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    assert play(loaded, compiled) == play(loaded, plain)
    assert 2 <= len(compiled._compiled) <= MAX_COMPILED
    assert not plain._compiled


def test_only_so_many_shapes_are_kept(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.backends.mlx.rows.decode_forward.MAX_COMPILED", 1)
    compiled = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    play(loaded, compiled)
    assert len(compiled._compiled) == 1


def test_compiled_steps_of_rows_that_share_say_what_plain_ones_apart_say(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pippin.backends.mlx.rows.grouping.SHARE_COST_TOKENS", 0)
    tokens = np.random.default_rng(3).integers(10, 8000, 150).astype(np.int32)
    compiled = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    said: list[dict[int, int]] = []
    for forward, shares in (
        (compiled, True),
        (DecodeForward(loaded.layout, loaded.forward), False),
    ):
        rows = DecodeRows(loaded.layout)
        prompts = {slot: tokens[: 150 - slot] for slot in (1, 2, 3)}
        states = [(slot, prefilled(loaded, ids)) for slot, ids in prompts.items()]
        rows.join(states, prompts if shares else None)
        current = dict.fromkeys(prompts, 7)
        said += [step(rows, current, forward) for _ in range(12)]
        assert [cohort.num_shared(leaf) for cohort in rows.cohorts for leaf in cohort.kv] == [
            128 if shares else 0
        ] * 2
    assert said[:12] == said[12:]
    assert any(cohort.shared != (0,) for shape in compiled._compiled for cohort in shape.cohorts)
