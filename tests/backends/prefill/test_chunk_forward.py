"""A compiled chunk is what the same chunk is in a plain forward, whatever is before it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from bundled import load_bundled
from near_ties import TOLERANCE, log_softmax
from pippin.backends.mlx.cpu.compiler import compile_available
from pippin.backends.mlx.cpu.operations.calls import operations
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.prefill.chunk_forward import LONGEST, ChunkForward
from serving import served

pytestmark = pytest.mark.skipif(
    operations() is None, reason="no operations of ours on this device: chunks are not listed"
)
needs_compiler = pytest.mark.skipif(
    not compile_available().available, reason=f"no compiler: {compile_available().reason}"
)


def forward_of(loaded: LoadedModel) -> ChunkForward:
    return ChunkForward(loaded.layout, loaded.forward, loaded.head, lambda: True)


def make_tokens(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 60, num_tokens).astype(np.int32)


def plain(loaded: LoadedModel, tokens: np.ndarray, prompt: PromptState) -> np.ndarray:
    batch = ChunkBatch(loaded.layout, [tokens], [prompt])
    logits = loaded.forward(batch.tokens, batch.caches)[0, -1:]
    batch.advance()
    return log_softmax(np.array(logits))


def assert_alike(mine: PromptState, theirs: PromptState) -> None:
    assert mine.length == theirs.length
    for found, wanted in zip(mine.arrays(), theirs.arrays(), strict=True):
        np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=0, atol=TOLERANCE)


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(1800)  # where no kernels have been built yet, a C++ compiler takes minutes
def test_chunks_of_a_prompt_are_what_plain_ones_are() -> None:
    loaded = load_bundled()
    assert loaded.compiles_chunks
    forward = forward_of(loaded)
    listed, theirs = PromptState(), PromptState()
    for number, length in enumerate((16, 43, 16, 43, 2)):
        tokens = make_tokens(length, number)
        batch = ChunkBatch(loaded.layout, [tokens], [listed])
        logits, hidden = forward(batch, listed)
        batch.advance()
        found = log_softmax(np.array(logits)[0])
        np.testing.assert_allclose(
            found, plain(loaded, tokens, theirs), rtol=0, atol=TOLERANCE, err_msg=f"chunk {number}"
        )
        again = log_softmax(np.array(loaded.logits_after(hidden))[0])
        np.testing.assert_allclose(again, found, rtol=0, atol=TOLERANCE)
        assert_alike(listed, theirs)
    assert set(forward._compiled) == {2, 16, 43}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3", "qwen3_5_moe"])
def test_other_families_alike(name: str) -> None:
    loaded = served(name)
    assert loaded.compiles_chunks
    forward = forward_of(loaded)
    listed, theirs = PromptState(), PromptState()
    for number, length in enumerate((70, 3, 130)):
        tokens = make_tokens(length, number)
        batch = ChunkBatch(loaded.layout, [tokens], [listed])
        logits, _ = forward.run_plain(batch, listed)
        batch.advance()
        found = log_softmax(np.array(logits)[0])
        wanted = plain(loaded, tokens, theirs)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE, err_msg=f"{number}")
        assert_alike(listed, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "deepseek_v3", "mamba2"])
def test_windows_sinks_latents_and_other_recurrences_run_plain(name: str) -> None:
    assert not served(name).compiles_chunks


def test_which_chunks_are_taken() -> None:
    loaded = load_bundled()
    ready = [False]
    forward = ChunkForward(loaded.layout, loaded.forward, loaded.head, lambda: ready[0])
    assert not forward.takes(2)  # kernels are in the making
    ready[0] = True
    assert forward.takes(2)
    assert not forward.takes(1)
    assert forward.takes(LONGEST)
    assert not forward.takes(LONGEST + 1)


def test_a_beginning_is_held_no_longer_than_its_chunk() -> None:
    loaded = served("llama")
    forward = forward_of(loaded)
    prompt = PromptState()
    plain(loaded, make_tokens(600, 1), prompt)
    mx.eval(prompt.arrays())
    for _ in range(2):
        batch = ChunkBatch(loaded.layout, [make_tokens(16, 2)], [prompt])
        mx.eval(*forward.run_plain(batch, prompt))
    mx.synchronize()
    before = mx.get_active_memory()
    held = sum(array.nbytes for array in prompt.arrays())
    del prompt, batch
    mx.synchronize()
    assert before - mx.get_active_memory() >= held
