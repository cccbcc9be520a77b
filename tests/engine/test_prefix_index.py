"""What a server knows of the prefixes that its engines can restore."""

from __future__ import annotations

import asyncio
import random

import pytest

from builders import Client, make_loop
from pippin.backends.fake import FakeBackend
from pippin.engine.engine_client import PrefixIndex
from pippin.engine.engine_pool import EnginePool
from pippin.engine.kv_events import BLOCK_TOKENS, Announcer, prefix_reports, prompt_hashes
from pippin.messages import RestorablePrefixes, pack_tokens
from pippin.types import GRID, Component
from replica_world import WORKLOADS, ReplicaWorld, mean_hit_rate

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE


def test_the_longest_prefix_counts() -> None:
    index = PrefixIndex()
    hashes = prompt_hashes(pack_tokens(list(range(5 * BLOCK_TOKENS + 3))), b"")
    assert len(hashes) == 5
    index.change(RestorablePrefixes(stored=[hashes[0], hashes[3]]))
    assert index.restorable_tokens(hashes) == 4 * BLOCK_TOKENS
    assert index.restorable_tokens(hashes[:3]) == BLOCK_TOKENS


def test_a_prefix_in_two_tiers_is_there_until_both_have_lost_it() -> None:
    index = PrefixIndex()
    index.change(RestorablePrefixes(stored=[1]))
    index.change(RestorablePrefixes(stored=[1], removed=[1]))  # written to disk, then evicted
    assert index.restorable_tokens([1]) == BLOCK_TOKENS
    index.change(RestorablePrefixes(removed=[1, 7]))
    assert index.restorable_tokens([1]) == 0
    index.change(RestorablePrefixes(stored=[2, 3]))
    index.change(RestorablePrefixes(cleared=True))
    assert len(index) == 0


def test_a_prompt_that_is_being_computed_counts_until_it_has_ended() -> None:
    index = PrefixIndex()
    for _ in range(2):
        index.expect([1, 2])
    index.drop([1, 2])
    index.clear()  # the engine is lost; the prompt is still expected until it is routed again
    assert index.restorable_tokens([1, 2, 3]) == 2 * BLOCK_TOKENS
    index.drop([1, 2])
    assert index.restorable_tokens([1, 2, 3]) == 0


def test_the_index_is_bounded() -> None:
    index = PrefixIndex(max_prefixes=3)
    index.change(RestorablePrefixes(stored=[1, 2, 3, 4, 5]))
    assert len(index) == 3
    index.change(RestorablePrefixes(removed=[1, 4]))
    index.change(RestorablePrefixes(stored=[6]))
    assert [index.restorable_tokens([hash]) > 0 for hash in range(1, 7)] == [
        *(False, True, True, False, False, True),
    ]


@pytest.mark.parametrize("components", [(A,), (A, W, S)])
def test_what_is_predicted_is_what_the_engine_restores(components: tuple[Component, ...]) -> None:
    """In whole blocks, with evictions and salts."""
    rng = random.Random(1)
    backend = FakeBackend(components=components, window=100, state_tokens=40, num_slots=4)
    capacity = backend.row_bytes(1500) + 8 * backend.spec.state_bytes
    client = Client(make_loop(backend=backend, capacity_bytes=capacity))
    cache = client.loop.scheduler.cache
    assert cache is not None
    index = PrefixIndex()
    announcer = Announcer()
    announcer.add(prefix_reports(cache.rules, index.change))
    announcer.observe("memory", cache)
    past: list[list[int]] = [[]]
    num_hits = 0
    for _ in range(40):
        prompt = rng.choice(past)[:400] + [rng.randrange(97) for _ in range(rng.choice([5, 130]))]
        salt = rng.choice([b"", b"s" * 32])
        announcer.collect()
        ends = range(len(prompt) // GRID * GRID, 0, -GRID)
        restorable = (end for end in ends if cache.probe(prompt, salt, limit=end) == end)
        predicted = index.restorable_tokens(prompt_hashes(pack_tokens(prompt), salt))
        assert predicted == next(restorable, 0)
        num_hits += predicted > 0
        past = [*past, [*prompt, *client.ask(prompt, max_tokens=2, salt=salt).tokens]][-4:]
    assert num_hits >= 5
    assert cache.stats.bytes_evicted


def test_a_prompt_that_was_evicted_is_remembered_and_a_shared_one_counts_for_less() -> None:
    index = PrefixIndex(max_prefixes=3)
    index.expect([1, 2])
    index.drop([1, 2])
    assert index.restorable_tokens([1, 2, 7]) == 0
    assert index.home_tokens([1, 2, 7]) == 2 * BLOCK_TOKENS
    for _ in range(3):
        index.expect([1])
    assert index.home_tokens([1, 2, 7]) == BLOCK_TOKENS * (1 / 4 + 1)
    assert index.home_tokens([7]) == 0
    index.expect([3, 4])  # of four blocks, the one sent longest ago is forgotten
    assert index.home_tokens([2]) == 0
    assert index.home_tokens([1, 2]) > 0
    index.clear()
    assert index.home_tokens([1, 2]) == 0


AMPLE, TIGHT = 1 << 30, 6_000_000  # bytes; in the second, conversations evict each other


@pytest.mark.parametrize("nbytes", [AMPLE, TIGHT])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_two_replicas_restore_nearly_as_much_as_one_cache(workload: str, nbytes: int) -> None:
    def rate(policy: str) -> float:
        return mean_hit_rate(policy, workload, num_replicas=2, nbytes=nbytes, seeds=range(4))

    whole, routed, in_turn = map(rate, ("one cache", "routed by prefix", "round-robin"))
    assert routed >= 0.9 * whole
    assert in_turn < routed


@pytest.mark.parametrize("nbytes", [AMPLE, 2 * TIGHT])
def test_clients_of_one_long_system_prompt_are_spread(nbytes: int) -> None:
    """A copy for all of them costs less than to leave a replica idle."""

    async def agents(world: ReplicaWorld) -> None:
        system = world.text(6000)

        async def talk() -> None:
            prompt = [*system]
            for _ in range(3):
                prompt += world.text(90)
                prompt += await world.ask(prompt)

        await asyncio.gather(*(talk() for _ in range(12)))

    async def work() -> list[int]:
        world = ReplicaWorld(EnginePool(2), nbytes, seed=0)
        await world.run(agents)
        return world.num_asked

    assert min(asyncio.run(work())) >= 12
