"""Overlap on == off, token for token, on a real model: random arrivals, ends and hits.

Where draws part no log probability tells whether they were level, so they may not part at all:
there are a hundred of them, and one in a hundred thousand hangs on rounding.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

import serving
from builders import Client, Reply, ToyGrammar
from cases import cases
from families import VOCAB
from near_ties import assert_same

MODELS = ("qwen3_5", *serving.TORCH_MODELS[:1])  # a small hybrid


def make_client(name: str, overlap: bool) -> Client:
    return serving.make_client(name, chunk=48, num_slots=3, overlap=overlap)


def play(client: Client, rng: random.Random) -> list[Reply]:
    """Four requests; some share a prefix, stop, are seeded, end early or obey a grammar."""
    shared = [rng.randrange(10, VOCAB) for _ in range(70)]
    ends: dict[str, int] = {}
    for number in range(4):
        prompt = shared[: rng.choice([0, 30, 70])] + [
            rng.randrange(10, VOCAB) for _ in range(rng.randrange(1, 20))
        ]
        params: dict[str, Any] = {"max_tokens": rng.randrange(1, 7), "logprobs": 20}
        if rng.random() < 0.5:
            params |= {"temperature": 0.8, "top_p": 0.9, "seed": number, "presence_penalty": 0.5}
        if rng.random() < 0.3:
            params["stop_ids"] = range(VOCAB // 2)
        grammar = ToyGrammar(3, VOCAB) if rng.random() < 0.25 else None
        reply = client.submit(prompt, grammar=grammar, **params)
        if rng.random() < 0.3:
            ends[reply.id] = rng.randrange(1, 4)
        for _ in range(rng.randrange(4)):
            step(client, ends)
    while not client.loop.idle:
        step(client, ends)
    return list(client.replies.values())


def step(client: Client, ends: dict[str, int]) -> None:
    client.step()
    for name, num_tokens in ends.items():
        if len(client.replies[name].tokens) >= num_tokens:
            client.loop.finish(name)


@pytest.mark.slow
@cases("name", MODELS)
@cases("seed", range(12))
def test_overlap_on_and_off_give_the_same_tokens(name: str, seed: int) -> None:
    on = play(make_client(name, True), random.Random(seed))
    off = play(make_client(name, False), random.Random(seed))
    assert_same(on, off)
    assert all(reply.tokens for reply in on)
