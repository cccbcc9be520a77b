"""What comes back from disk: tokens after a restart are those of a cold engine, for every kind."""

from __future__ import annotations

import numpy as np
import pytest

from cases import cases
from memory_store import MemoryStore
from near_ties import assert_same, count_same
from reference import BUNDLED
from serving import (
    ONE_OF_EACH_KIND,
    TORCH,
    TORCH_MODELS,
    ask_all,
    check_idle,
    cold,
    counted_prompts,
    make_client,
    make_prompt,
)

pytestmark = pytest.mark.slow

# On torch: convolutions without a state, Mamba-2, latent cells.
OTHER_KINDS = ("lfm2", "granitemoehybrid", "deepseek_v3") if TORCH_MODELS else ()
NAMES = (
    *(*ONE_OF_EACH_KIND, "deepseek_v32", *TORCH_MODELS),
    *(f"{TORCH}{name}" for name in OTHER_KINDS),
)
LENS = (100, 129, 330)
BETWEEN_BACKENDS = 0.01  # of a log probability: they round differently


def run(name: str, store: MemoryStore, prompts: list[list[int]], max_tokens: int = 12):
    """One engine's life; replies, and how many prompt tokens were computed."""
    client = make_client(name, store=store)
    client.loop.scheduler.traffic.clock = lambda: 0.0  # the rest is written when it closes
    with counted_prompts() as counted:
        replies = ask_all(client, prompts, max_tokens=max_tokens)
    check_idle(client)
    client.loop.close()
    return replies, counted.take()


@cases("name", NAMES)
def test_after_a_restart_nothing_known_is_computed_and_tokens_are_those_of_cold(name: str) -> None:
    store = MemoryStore(b"test", 1 << 30)
    prompts = [make_prompt(name, n, seed=n) for n in LENS]
    first, _ = run(name, store, prompts)
    again, computed = run(name, store, prompts)
    assert_same(again, cold(name, prompts, max_tokens=12))
    assert [reply.cached_tokens for reply in again] == list(LENS)
    assert computed == 0
    turns = [[*p, *r.tokens, *make_prompt(name, 9, 5)] for p, r in zip(prompts, first, strict=True)]
    replies, computed = run(name, store, turns, max_tokens=4)
    assert_same(replies, cold(name, turns))
    assert computed == sum(map(len, turns)) - sum(reply.cached_tokens or 0 for reply in replies)
    for reply, length in zip(replies, LENS, strict=True):
        assert (reply.cached_tokens or 0) >= length


@pytest.mark.parametrize("turned", [False, True], ids=["mlx to torch", "torch to mlx"])
def test_what_one_backend_wrote_the_other_reads(turned: bool) -> None:
    if not TORCH_MODELS:
        pytest.skip("torch is not installed")
    names = [BUNDLED, f"{TORCH}{BUNDLED}"]
    writer, reader = reversed(names) if turned else names
    store = MemoryStore(b"test", 1 << 30)
    prompts = [make_prompt(BUNDLED, n, seed=n) for n in LENS]
    run(writer, store, prompts)
    replies, _ = run(reader, store, prompts)
    for mine, expected in zip(replies, cold(reader, prompts, max_tokens=12), strict=True):
        same = count_same(mine.tokens, expected)
        scores = [[scored.logprob for scored in r.logprobs[:same]] for r in (mine, expected)]
        np.testing.assert_allclose(*scores, rtol=0, atol=BETWEEN_BACKENDS)
    assert [reply.cached_tokens for reply in replies] == list(LENS)
