"""The same prompt again on real models: no forward, and the tokens of a cold engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from cases import cases
from families import VOCAB
from near_ties import assert_same
from pippin.backends.mlx.head import Head, measure_hidden
from pippin.cache.tree.components import HIDDEN
from serving import (
    ON_EITHER_BACKEND,
    TORCH_MODELS,
    ask_all,
    check_idle,
    cold,
    counted_prompts,
    make_client,
    make_prompt,
    nodes_of,
    served,
)

pytestmark = pytest.mark.slow

LENS = (1, 64, 150)


@cases("name", ON_EITHER_BACKEND)
def test_no_forward_and_the_same_tokens(name: str) -> None:
    prompts = [make_prompt(name, n, seed=3) for n in LENS]
    expected = cold(name, prompts, max_tokens=6)
    client = make_client(name)
    ask_all(client, prompts, max_tokens=6)
    with counted_prompts() as counted:
        warm = ask_all(client, prompts, max_tokens=6)
    assert counted.lens == []
    assert [reply.cached_tokens for reply in warm] == list(LENS)
    assert_same(warm, expected)
    check_idle(client)


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama", *TORCH_MODELS])
def test_seeded_draws_are_those_of_a_cold_engine(name: str) -> None:
    """With penalties, which look at the prompt that is not run."""
    params = {
        "temperature": 0.8,
        "seed": 11,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logprobs": 2,
        "max_tokens": 6,
    }
    prompt = make_prompt(name, 90, seed=4)
    expected = make_client(name, cache=False).ask(prompt, **params)
    client = make_client(name)
    replies = [client.ask(prompt, **params) for _ in range(2)]
    assert_same(replies, [expected, expected])
    assert [reply.cached_tokens for reply in replies] == [0, 90]


@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss", "llama"])
def test_a_prompts_end_keeps_a_few_kilobytes(name: str) -> None:
    client = make_client(name)
    prompt = make_prompt(name, 90, seed=5)
    client.ask(prompt, max_tokens=5)
    kept = [n.payloads[HIDDEN] for n in nodes_of(client, prompt) if n.payloads[HIDDEN] is not None]
    assert [payload.nbytes for payload in kept] == [served(name).hidden_bytes]
    assert 0 < kept[0].nbytes < 16 << 10


@pytest.mark.parametrize("name", ["qwen3_5", "llama"])
def test_without_a_known_head_the_last_token_is_computed_again(name: str) -> None:
    loaded = replace(served(name), hidden_bytes=0)
    client = make_client(name, model=loaded)
    prompt = make_prompt(name, 90, seed=6)
    replies = [client.ask(prompt, max_tokens=4, logprobs=2) for _ in range(2)]
    assert_same(replies, cold(name, [prompt, prompt]))
    assert 0 < (replies[1].cached_tokens or 0) < 90
    check_idle(client)


class Toy(nn.Module):
    """One layer, a head, and what some models do behind it."""

    def __init__(self, head: str = "lm_head", *, adds_input: bool = False) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCAB, 8)
        setattr(self, head, nn.Linear(8, VOCAB))
        self._head, self._adds_input = head, adds_input

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = self.layer(tokens)
        logits: mx.array = mx.tanh(self[self._head](hidden) / 30.0) * 30.0
        return logits + self.layer(tokens).sum() if self._adds_input else logits


@pytest.mark.parametrize(
    ("toy", "nbytes"),
    [(Toy(), 32), (Toy("projection"), 0), (Toy(adds_input=True), 0)],
    ids=["known", "unknown", "not the head alone"],
)
def test_a_head_is_known_if_hidden_vectors_alone_give_the_logits(toy: Toy, nbytes: int) -> None:
    head = Head(toy)
    tokens = iter(([[1]], [[2]]))
    assert measure_hidden(head, lambda: toy(mx.array(next(tokens)))) == nbytes


def test_a_replayed_head_does_all_that_a_model_does_behind_it() -> None:
    toy = Toy()
    head = Head(toy)
    tokens: Sequence[Any] = [[3, 4, 5]]
    expected = toy(mx.array(tokens))
    head.positions = mx.array([[1]])
    toy(mx.array(tokens))
    head.positions = None
    hidden = head.take_selected()
    assert hidden is not None
    assert head.take_selected() is None
    with head.replaying(hidden):
        again = toy(mx.array([[0]]))
    assert mx.allclose(again[:, 0], expected[:, 1]).item()
