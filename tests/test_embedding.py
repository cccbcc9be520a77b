"""Embeddings: the hidden vector after a prompt, through the scheduler like any other prompt."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import serving
from builders import check_idle, make_client
from pippin import LLM, SamplingParams
from pippin.backends.fake import FakeBackend
from pippin.config import Config, ModelConfig
from pippin.embedding import embedding_of, embedding_submit
from pippin.errors import ContextOverflow, RequestError, UnsupportedField
from pippin.messages import TokenDelta
from pippin.scheduler.loop import Loop
from reference import BUNDLED, plain_model

TOY = Config(model=ModelConfig(backend="fake"))


def ask(loop: Loop, prompts: Sequence[Sequence[int]]) -> list[TokenDelta]:
    """All at once; the one delta of each."""
    ids = [f"{loop.scheduler.metrics.requests_finished}-{n}" for n in range(len(prompts))]
    for id, prompt in zip(ids, prompts, strict=True):
        loop.submit(embedding_submit(id, prompt))
    told: dict[str, TokenDelta] = {}
    while not loop.idle:
        for delta in loop.step():
            assert delta.id not in told, "an embedding is one message"
            told[delta.id] = delta
    return [told[id] for id in ids]


def embed(loop: Loop, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    return np.stack([embedding_of(delta) for delta in ask(loop, prompts)])


def plain_embedding(name: str, tokens: Sequence[int]) -> np.ndarray:
    """What stock mlx-lm's layers and last norm make of the last token."""
    model = plain_model(name)
    layers = getattr(model, "language_model", model).model
    hidden = layers(mx.array([tokens]), cache=make_prompt_cache(model))
    vector = np.array(hidden[0, -1].astype(mx.float32))
    return vector / np.linalg.norm(vector)


@pytest.mark.slow
@pytest.mark.parametrize("name", [BUNDLED, "llama", "qwen3_5", "gpt_oss"])
def test_vectors_are_those_of_the_plain_model(name: str) -> None:
    client = serving.make_client(name, chunk=64)
    prompts = [serving.make_prompt(name, length, seed=length) for length in (1, 20, 150)]
    expected = np.stack([plain_embedding(name, prompt) for prompt in prompts])
    for _ in range(2):  # the second time nothing is computed
        np.testing.assert_allclose(embed(client.loop, prompts), expected, rtol=0, atol=2e-3)
    assert client.loop.scheduler.metrics.computed_tokens == sum(map(len, prompts))
    serving.check_idle(client)


@pytest.mark.parametrize("overlap", [True, False])
def test_they_are_batched_cached_and_leave_no_reply(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    prompts = [list(range(n, n + 70)) for n in range(3)]
    first = ask(client.loop, prompts)
    assert [delta.finish for delta in first] == ["stop"] * 3
    assert all(delta.tokens == [] and delta.cached_tokens == 0 for delta in first)
    metrics = client.loop.scheduler.metrics
    assert metrics.generated_tokens == 0
    assert all(record.decode_rows == 0 for record in metrics.records)
    again = ask(client.loop, prompts)
    assert [delta.cached_tokens for delta in again] == [70] * 3
    assert [d.embedding for d in again] == [d.embedding for d in first]
    cache = client.loop.scheduler.cache
    assert cache is not None
    assert cache.counters()["tokens"] == 210  # no token was drawn into the tree
    check_idle(client)


def test_a_prompt_that_was_embedded_is_cached_for_a_reply_and_the_other_way_round() -> None:
    client = make_client()
    prompt = list(range(70))
    alone = embed(make_client().loop, [prompt])
    assert client.ask(prompt).cached_tokens == 0
    np.testing.assert_array_equal(embed(client.loop, [prompt]), alone)
    other = list(range(5, 75))
    embed(client.loop, [other])
    reply = client.ask(other)
    assert reply.cached_tokens == 70
    assert reply.tokens == make_client().ask(other).tokens


def test_replies_go_on_beside_embeddings() -> None:
    alone = make_client().ask([1, 2, 3], max_tokens=20)
    client = make_client()
    reply = client.submit([1, 2, 3], max_tokens=20)
    client.step(3)
    client.loop.submit(embedding_submit("e", list(range(300))))
    while not client.loop.idle:
        for delta in client.loop.step():
            if delta.id == "e":
                assert delta.embedding is not None
            else:
                reply.take(delta)
    assert reply.tokens == alone.tokens


def test_a_model_whose_head_is_not_known_gives_none() -> None:
    client = make_client(backend=FakeBackend(num_slots=4, knows_head=False))
    with pytest.raises(UnsupportedField, match="no embeddings"):
        embed(client.loop, [[1, 2, 3]])


def test_llm_embeds_text_and_tokens_at_length_one() -> None:
    with LLM(config=TOY) as llm:
        vectors = llm.embed(["a fox", [5, 6, 7], "a fox"])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, rtol=1e-5)
        assert vectors.dtype == np.float32
        np.testing.assert_array_equal(vectors[0], vectors[2])
        np.testing.assert_array_equal(llm.embed([5, 6, 7]), vectors[1:2])
        assert len(llm.embed([[n, n + 1] for n in range(90)])) == 90
        with pytest.raises(ContextOverflow):
            llm.embed(["a fox", [5] * llm.max_len])
        with pytest.raises(RequestError, match="nothing to embed"):
            llm.embed([])
        assert llm.generate("a fox", SamplingParams(max_tokens=2))[0].tokens
        assert llm.loop.idle
