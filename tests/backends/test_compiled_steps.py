"""A compiled decode step gives what the plain one gives, as rows join, are flushed and leave."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import pippin
from pippin.backends.mlx.blas import compile_available
from pippin.backends.mlx.decode_forward import MAX_COMPILED, DecodeForward
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.mlx.prefill import ChunkBatch, PromptState
from pippin.backends.mlx.rows import DecodeRows

MODEL = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"

pytestmark = pytest.mark.skipif(
    not compile_available().available, reason=f"no compiler: {compile_available().reason}"
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(MODEL)


def prompt_of(loaded: LoadedModel, num_tokens: int, seed: int) -> PromptState:
    ids = np.random.default_rng(seed).integers(10, 8000, num_tokens).astype(np.int32)
    prompt = PromptState()
    batch = ChunkBatch(loaded.layout, [ids], [prompt])
    loaded.forward(batch.tokens, batch.caches)
    batch.advance()
    mx.eval(prompt.arrays())
    return prompt


def play(loaded: LoadedModel, forward: DecodeForward) -> list[dict[int, int]]:
    """Greedy tokens by slot of each step: one row, then two, then the first leaves."""
    rows = DecodeRows(loaded.layout)
    current: dict[int, int] = {}
    said: list[dict[int, int]] = []

    def run(slots: list[int], num_steps: int) -> None:
        for _ in range(num_steps):
            at, logits = rows.advance(
                slots,
                lambda at: mx.array([current.get(int(s), 0) for s in at], dtype=mx.int32),
                forward,
            )
            drawn = np.asarray(mx.argmax(logits, axis=-1))
            current.update({int(s): int(t) for s, t in zip(at, drawn, strict=True) if s})
            said.append(dict(current))

    rows.join([(1, prompt_of(loaded, 64, 1))])
    run([1], 6)
    rows.join([(2, prompt_of(loaded, 33, 2))])
    run([1, 2], 70)
    rows.leave(1)
    run([2], 10)
    return said


def test_compiled_steps_say_what_plain_ones_say(loaded: LoadedModel) -> None:
    plain = DecodeForward(loaded.layout, loaded.forward)
    compiled = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    assert play(loaded, compiled) == play(loaded, plain)
    assert 2 <= len(compiled._compiled) <= MAX_COMPILED
    assert not plain._compiled


def test_only_so_many_shapes_are_kept(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.backends.mlx.decode_forward.MAX_COMPILED", 1)
    compiled = DecodeForward(loaded.layout, loaded.forward, compiled=lambda: True)
    play(loaded, compiled)
    assert len(compiled._compiled) == 1
