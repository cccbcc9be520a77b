"""Reuse while memory is short: sixteen clients, evictions in earnest, every byte accounted for."""

from __future__ import annotations

import pytest

from builders import Client, Reply
from cases import cases
from families import FAMILIES
from near_ties import assert_same
from pippin.backends.mlx.backend import MLXBackend
from pippin.cache.prefix_cache import PrefixCache
from pippin.types import Component
from serving import (
    ONE_OF_EACH_KIND,
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
    served,
)

pytestmark = pytest.mark.slow

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
    return {c: n for c, n in cache.tree.stats.evictions.items() if c in cache.tree.component_bytes}


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
    cache.check_integrity()
    assert active_bytes() == idle


@pytest.mark.usefixtures("exact_bytes")
@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_a_step_leaves_nothing_behind(name: str) -> None:
    client = make_client(name, cache=False)
    for seed in range(3):
        client.submit(make_prompt(name, 20, seed), max_tokens=60)
    client.step(20)
    held = active_bytes()
    client.step(30)  # the tails hold 64: no row has taken more room since
    assert active_bytes() == held
    client.run()


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
    assert cache_of(client).tree.stats.bytes_evicted > 2 * capacity_bytes
    backend = client.loop.backend
    assert isinstance(backend, MLXBackend)
    assert not backend._admitted
