"""Warm == cold, token by token, on every family and on the bundled model.

Each scenario also counts the prompt tokens that were really computed, and holds them to the bound:
1 token of a shared prefix where all layers attend (windows included), 127 where some keep a state,
and none of a prompt that was there as a whole. While memory is short, and after a restart too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from builders import Client, Reply
from cases import cases
from families import FAMILIES, VOCAB
from integrity import check_integrity
from memory_store import MemoryStore
from near_ties import assert_same, count_same
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.head import Head, measure_hidden
from pippin.backends.mlx.rows import memory
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.components import ATTENTION, HIDDEN, STATE, WINDOW
from pippin.cache.tree.eviction import Unit
from pippin.types import GRID, Component
from reference import BUNDLED
from serving import (
    BUNDLED_ON_EITHER,
    ON_EITHER_BACKEND,
    ONE_OF_EACH_KIND,
    TORCH,
    TORCH_MODELS,
    TRIED_MOST,
    active_bytes,
    ask_all,
    cache_of,
    check_idle,
    cold,
    counted_prompts,
    diverge,
    make_client,
    make_prompt,
    most_recomputed,
    nodes_of,
    served,
)

pytestmark = pytest.mark.slow

# One model of each kind is tried with all of these, the others with few.
OFFSETS = (*range(60, 69), *range(124, 133))


FEW_OFFSETS = (63, 64, 65, 128)


LENS = (2, 63, 64, 65, 127, 128, 129, 150)


FEW_LENS = (64, 129)


BASE_LEN = 140


def ask_warm(client: Client, name: str, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Ask for all at once: right, and counted honestly. The cached tokens of each."""
    with counted_prompts() as counted:
        warm = ask_all(client, prompts)
    assert_same(warm, cold(name, prompts))
    cached = [reply.cached_tokens or 0 for reply in warm]
    assert counted.take() == sum(map(len, prompts)) - sum(cached)
    check_idle(client)
    return cached


def check_warm(
    client: Client, name: str, prompts: Sequence[Sequence[int]], shared: Sequence[int]
) -> None:
    """Little of what was shared is computed again."""
    cached = ask_warm(client, name, prompts)
    for found, common in zip(cached, shared, strict=True):
        assert common - most_recomputed(name) <= found <= common


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_divergence_at_every_offset_around_the_grid(name: str) -> None:
    offsets = OFFSETS if name in TRIED_MOST else FEW_OFFSETS
    client = make_client(name)
    bases = [make_prompt(name, BASE_LEN, seed) for seed in range(len(offsets))]
    ask_all(client, bases, max_tokens=1)
    prompts = [
        diverge(name, base, at, 1 + number % 20, seed=200 + number)
        for number, (base, at) in enumerate(zip(bases, offsets, strict=True))
    ]
    check_warm(client, name, prompts, offsets)


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_the_same_prompt_again_and_one_token_more(name: str) -> None:
    client = make_client(name)
    lens = LENS if name in TRIED_MOST else FEW_LENS
    bases = [make_prompt(name, n, seed=7) for n in lens]
    expected = cold(name, bases)
    assert_same(ask_all(client, bases), expected)
    assert ask_warm(client, name, bases) == list(lens)
    longer = [[*base, *make_prompt(name, 1, seed=n)] for base, n in zip(bases, lens, strict=True)]
    check_warm(client, name, longer, lens)


@pytest.mark.parametrize("name", [*ON_EITHER_BACKEND, *BUNDLED_ON_EITHER])
def test_turns_find_the_replies_before_them(name: str) -> None:
    client = make_client(name)
    histories = [
        make_prompt(name, n, seed=11) for n in ((40, 62, 90) if name in TRIED_MOST else (90,))
    ]
    for turn, max_tokens in enumerate((3, 70 if name in TRIED_MOST else 35)):
        replies = ask_all(client, histories, max_tokens=max_tokens)
        answered = [[*h, *r.tokens] for h, r in zip(histories, replies, strict=True)]
        users = [make_prompt(name, 5 + turn, seed=20 + i) for i in range(len(answered))]
        histories = [[*a, *user] for a, user in zip(answered, users, strict=True)]
        check_warm(client, name, histories, [len(a) for a in answered])


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_siblings_that_branch_in_the_middle(name: str) -> None:
    """All at once: the first computes what they share, the others wait for it."""
    client = make_client(name)
    trunk = make_prompt(name, 100, seed=31)
    siblings = [diverge(name, trunk, 100, n, seed=40 + n) for n in (1, 20, 28, 29, 60)]
    cached = ask_warm(client, name, siblings)
    assert sum(found >= 100 - most_recomputed(name) for found in cached) >= len(siblings) - 1
    twigs = [diverge(name, siblings[-1], at, 9, seed=50 + at) for at in (90, 101, 128, 150)]
    check_warm(client, name, twigs, [90, 101, 128, 150])


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_after_eviction_of_the_middle_of_a_path(name: str) -> None:
    """States and windows go from the middle; attention KV only from the end."""
    client = make_client(name)
    base = make_prompt(name, 200, seed=61)
    longer = diverge(name, base, 200, 70, seed=62)
    ask_all(client, [base])
    ask_all(client, [longer])
    store = cache_of(client)
    for node in nodes_of(client, longer):
        if 64 < node.end < 250 and node.children:
            for unit, index in ((Unit.STATE, STATE), (Unit.WINDOW, WINDOW)):
                if node.payloads[index] is not None:
                    store.take(node, unit)
    leaf = nodes_of(client, longer)[-1]
    if leaf.payloads[ATTENTION] is not None and not leaf.children:
        store.take(leaf, Unit.LEAF)
    check_integrity(cache_of(client))
    prompts = [base, longer, diverge(name, longer, 190, 10, seed=63)]
    assert_same(ask_all(client, prompts), cold(name, prompts))
    check_idle(client)
    check_warm(client, name, prompts, [200, 270, 200])  # what was evicted has been filled in


NUM_CLIENTS = 16


REPLY_LEN = 3


VIEW_BYTES = 1 << 15  # a copy may stay a view of what is hardly larger


def run_within_budget(client: Client) -> None:
    """Step until idle; rows and tree never take more than they may."""
    budget, cache = client.loop.scheduler.budget, cache_of(client)
    while not client.loop.idle:
        client.step()
        assert cache.nbytes <= cache.capacity_bytes
        assert budget.claimed + cache.nbytes <= budget.capacity
    check_idle(client)


def tight_capacity(name: str, num_tokens: int, num_rows: int) -> int:
    """Bytes for so many running requests of this length, and nothing beside them."""
    return num_rows * make_client(name).loop.backend.row_bytes(num_tokens)


def evictions(cache: PrefixCache) -> dict[Component, int]:
    return {c: n for c, n in cache.stats.evictions.items() if c in cache.component_bytes}


@cases("name", TRIED_MOST)
def test_sixteen_clients_under_pressure(name: str) -> None:
    """Four shared beginnings, four clients each; room for some of it only."""
    client = make_client(name, capacity_bytes=tight_capacity(name, 110, 6))
    beginnings = [make_prompt(name, 70, seed) for seed in range(4)]
    histories = [
        diverge(name, beginnings[number % 4], 70 - number, 10 + number, seed=300 + number)
        for number in range(NUM_CLIENTS)
    ]
    asked: list[list[int]] = []
    replies: list[Reply] = []
    with counted_prompts() as counted:
        for turn in range(2):
            asked += histories
            replies += [client.submit(h, max_tokens=REPLY_LEN, logprobs=2) for h in histories]
            run_within_budget(client)
            histories = [
                [*history, *reply.tokens, *make_prompt(name, 4, seed=turn)]
                for history, reply in zip(histories, replies[-NUM_CLIENTS:], strict=True)
            ]
    assert_same(replies, cold(name, asked, max_tokens=REPLY_LEN))
    cached = sum(reply.cached_tokens or 0 for reply in replies)
    assert counted.take() == sum(map(len, asked)) - cached
    assert cached > 0
    assert all(evictions(cache_of(client)).values()), "nothing was evicted: no pressure"


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tree_holds_the_bytes_that_it_counts_and_gives_all_back(name: str) -> None:
    client = make_client(name, chunk=512)
    cache = cache_of(client)
    for seed in (5, 1):  # constants of these shapes are made on first use, or on the second
        before = [make_prompt(name, 160, seed=seed), make_prompt(name, 150, seed=seed + 1)]
        ask_all(client, before, max_tokens=2)
        cache.flush()
        while cache.flushing:
            cache.free_flushed(64)
    idle = active_bytes()
    prompts = [make_prompt(name, 160, seed=3), make_prompt(name, 150, seed=4)]
    ask_all(client, prompts, max_tokens=2)
    while cache.nbytes:
        assert 0 <= active_bytes() - idle - cache.nbytes <= VIEW_BYTES
        assert cache.evict(cache.nbytes // 2 + 1)
    check_integrity(cache)
    assert active_bytes() == idle


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("name", ["qwen3_5", "gpt_oss"])
def test_a_long_run_of_distinct_prompts_stays_inside_its_bytes(name: str) -> None:
    served(name)
    capacity_bytes = tight_capacity(name, 110, 3)
    client = make_client(name, capacity_bytes=capacity_bytes)
    idle = active_bytes()
    peaks = []
    for number in range(8):
        for seed in range(4):
            client.submit(make_prompt(name, 90 + 4 * seed, seed=100 * number), max_tokens=2)
        run_within_budget(client)
        peaks.append(active_bytes() - idle)
    assert max(peaks) <= capacity_bytes
    assert cache_of(client).stats.bytes_evicted > 2 * capacity_bytes
    backend = client.loop.backend
    assert isinstance(backend, MLXBackend)
    assert not backend._slots


RESTORED_LENS = (1, 64, 150)


@cases("name", ON_EITHER_BACKEND)
def test_no_forward_and_the_same_tokens(name: str) -> None:
    prompts = [make_prompt(name, n, seed=3) for n in RESTORED_LENS]
    expected = cold(name, prompts, max_tokens=6)
    client = make_client(name)
    ask_all(client, prompts, max_tokens=6)
    with counted_prompts() as counted:
        warm = ask_all(client, prompts, max_tokens=6)
    assert counted.lens == []
    assert [reply.cached_tokens for reply in warm] == list(RESTORED_LENS)
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


# On torch: convolutions without a state, Mamba-2, latent cells.
OTHER_KINDS = ("lfm2", "granitemoehybrid", "deepseek_v3") if TORCH_MODELS else ()


NAMES = (
    *(*ONE_OF_EACH_KIND, "deepseek_v32", *TORCH_MODELS),
    *(f"{TORCH}{name}" for name in OTHER_KINDS),
)


STORED_LENS = (100, 129, 330)


BETWEEN_BACKENDS = 0.01  # of a log probability: they round differently


def run_engine(name: str, store: MemoryStore, prompts: list[list[int]], max_tokens: int = 12):
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
    prompts = [make_prompt(name, n, seed=n) for n in STORED_LENS]
    first, _ = run_engine(name, store, prompts)
    again, computed = run_engine(name, store, prompts)
    assert_same(again, cold(name, prompts, max_tokens=12))
    assert [reply.cached_tokens for reply in again] == list(STORED_LENS)
    assert computed == 0
    turns = [[*p, *r.tokens, *make_prompt(name, 9, 5)] for p, r in zip(prompts, first, strict=True)]
    replies, computed = run_engine(name, store, turns, max_tokens=4)
    assert_same(replies, cold(name, turns))
    assert computed == sum(map(len, turns)) - sum(reply.cached_tokens or 0 for reply in replies)
    for reply, length in zip(replies, STORED_LENS, strict=True):
        assert (reply.cached_tokens or 0) >= length


@pytest.mark.parametrize("turned", [False, True], ids=["mlx to torch", "torch to mlx"])
def test_what_one_backend_wrote_the_other_reads(turned: bool) -> None:
    if not TORCH_MODELS:
        pytest.skip("torch is not installed")
    names = [BUNDLED, f"{TORCH}{BUNDLED}"]
    writer, reader = reversed(names) if turned else names
    store = MemoryStore(b"test", 1 << 30)
    prompts = [make_prompt(BUNDLED, n, seed=n) for n in STORED_LENS]
    run_engine(writer, store, prompts)
    replies, _ = run_engine(reader, store, prompts)
    for mine, expected in zip(replies, cold(reader, prompts, max_tokens=12), strict=True):
        same = count_same(mine.tokens, expected)
        scores = [[scored.logprob for scored in r.logprobs[:same]] for r in (mine, expected)]
        np.testing.assert_allclose(*scores, rtol=0, atol=BETWEEN_BACKENDS)
    assert [reply.cached_tokens for reply in replies] == list(STORED_LENS)


TAIL_MODELS = ("qwen3_5", "gpt_oss", "llama")  # a hybrid, one with windows, one with neither


NUM_TOKENS = 100


@cache
def usual_replies(name: str) -> list[Reply]:
    return ask_all(make_client(name), prompts_of(name), max_tokens=NUM_TOKENS)


def prompts_of(name: str) -> list[list[int]]:
    return [make_prompt(name, n, seed=n) for n in (20, 70, 130)]


@pytest.mark.parametrize("tail", [32, 96])
@pytest.mark.parametrize("name", TAIL_MODELS)
def test_with_a_tail_of_any_length_replies_are_the_same_and_what_they_leave_is_right(
    name: str, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tail != GRID
    prompts, expected = prompts_of(name), usual_replies(name)
    monkeypatch.setattr(memory, "TAIL", tail)
    client = make_client(name)
    replies = ask_all(client, prompts, max_tokens=NUM_TOKENS)
    assert_same(replies, expected)
    check_idle(client)
    turns = [[*p, *r.tokens, 5, 6, 7] for p, r in zip(prompts, replies, strict=True)]
    later = ask_all(client, turns)
    assert all((reply.cached_tokens or 0) >= GRID for reply in later)
    assert_same(later, cold(name, turns))
