"""A compiled forward of chunks gives what the plain one gives, for every batch of its shape.

Families are compared in test_mlx_families.py, without a compiler.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from near_ties import TOLERANCE
from pippin.backends.mlx.cpu.compiler import compile_available
from pippin.backends.mlx.prefill import chunk_forward
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.prefill.chunk_forward import ChunkForward
from pippin.backends.mlx.shapes import Ladder
from serving import make_prompt, served

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # where no kernels have been built yet, a C++ compiler takes minutes
    pytest.mark.skipif(
        not compile_available().available, reason=f"no compiler: {compile_available().reason}"
    ),
]

NAME = "llama"


def tokens(num_tokens: int, seed: int) -> np.ndarray:
    return np.array(make_prompt(NAME, num_tokens, seed), dtype=np.int32)


def run(forward: ChunkForward, starts: list[int], lens: list[int]) -> list[np.ndarray]:
    """Logits after two rows' chunks, and what the rows hold then."""
    layout = served(NAME).layout
    states = [PromptState() for _ in starts]
    begun = [(tokens(n, seed=n), state) for n, state in zip(starts, states, strict=True) if n]
    for ids, state in begun:
        batch = ChunkBatch(layout, [ids], [state])
        served(NAME).forward(batch.tokens, batch.caches)
        batch.advance()
    batch = ChunkBatch(layout, [tokens(n, seed=100 + n) for n in lens], states, Ladder())
    result = forward(batch, mx.array(batch.last_positions[:, None]), taps=False)
    batch.advance()
    assert result.hidden is not None
    arrays = [result.logits, result.hidden, *(a for state in states for a in state.arrays())]
    return [np.array(array) for array in arrays]


def test_batches_of_one_shape_share_a_graph_and_nothing_else() -> None:
    plain, compiled = (ChunkForward(served(NAME), compiled=on) for on in (False, True))
    for starts, lens in (([0, 70], [20, 33]), ([3, 100], [40, 25]), ([128, 65], [48, 1])):
        pairs = zip(run(compiled, starts, lens), run(plain, starts, lens), strict=True)
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
    assert len(compiled._compiled) == 1
    assert not plain._compiled


def test_only_so_many_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_forward, "MAX_COMPILED", 2)
    compiled = ChunkForward(served(NAME), compiled=True)
    for length in (16, 32, 64):
        run(compiled, [0], [length])
    assert [shape.width for shape in compiled._compiled] == [32, 64]
