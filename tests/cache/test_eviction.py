"""What goes first, and what goes with what."""

from __future__ import annotations

import random

import pytest
from naive_cache import NBYTES, A, CheckedCache, S, W

from pippin.cache.policy import Placement
from pippin.cache.tree.eviction import MAX_CANDIDATES, NEVER, Unit
from pippin.cache.tree.radix import Node
from pippin.types import Component


def test_leaves_go_least_recent_first() -> None:
    checked = CheckedCache([A])
    for token in (1, 2, 3):
        checked.insert([token] * 4, 0)
    checked.match([1] * 4)
    assert checked.evict(1) == 4 * NBYTES[A]
    assert [checked.match([token] * 4).length for token in (1, 2, 3)] == [4, 0, 4]


def test_kv_below_the_last_state_goes_before_anything_reachable() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1] * 8, 0, states=[8])
    checked.insert([2] * 8, 0, states=[4])  # nobody can stop in its last 4 tokens
    checked.match([1] * 8)
    assert checked.evict(1) == 4 * NBYTES[A]
    assert checked.match([2] * 8).length == 4
    assert checked.match([1] * 8).length == 8


def test_interior_grid_states_go_before_the_leaf() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(64 * 4))
    checked.insert(prompt, 0, states=[64, 128, 192, 256])
    checked.evict(NBYTES[S])
    assert checked.match(prompt).length == 256
    assert checked.cache.stats.evictions[A] == 0
    assert checked.cache.stats.evictions[S] == 1


def test_a_state_that_many_branch_from_outlives_grid_states_and_old_leaves() -> None:
    checked = CheckedCache([A, S])
    system = [7] * 128
    checked.insert(system, 0, states=[64, 128])
    for user in range(4):
        checked.lock([*system, user])
        checked.insert([*system, *[user] * 8], 128, states=[136])
        checked.unlock(0)
    used = checked.cache.stats.placements[Placement.GRID]
    assert (used.used, used.tokens_saved) == (4, 4 * 64)
    checked.evict(NBYTES[S] + 1)  # the other grid state, then the oldest leaf
    assert checked.match([*system, 9]).length == 128
    assert checked.match([*system, *[0] * 8]).length == 128
    assert checked.match([*system, *[3] * 8]).length == 136


@pytest.mark.parametrize("used", [64, 128])
def test_a_state_that_was_used_outlives_its_neighbour(used: int) -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(192))
    checked.insert(prompt, 0, states=[64, 128, 192])
    checked.lock(prompt, limit=used)
    checked.unlock(0)
    checked.match(prompt)  # both are equally recent
    checked.evict(NBYTES[S])
    assert checked.match(prompt, limit=191).length == max(used, 64)
    assert checked.match(prompt, limit=used).length == used


def popular(capacity_prompts: int) -> tuple[CheckedCache, list[int]]:
    """A prompt of 64 tokens that was used sixteen times, in a cache that holds so many of them."""
    checked = CheckedCache([A, S], capacity=capacity_prompts * (64 * NBYTES[A] + NBYTES[S]))
    prompt = [7] * 64
    checked.insert(prompt, 0, states=[64])
    for _ in range(16):
        checked.lock(prompt)
        checked.unlock(0)
    return checked, prompt


def test_popularity_lasts_but_not_for_ever() -> None:
    checked, prompt = popular(capacity_prompts=4)
    for token in range(100, 130):
        checked.insert([token] * 64, 0, states=[64])
    assert checked.cache.probe(prompt) == 64
    for token in range(200, 300):
        checked.insert([token] * 64, 0, states=[64])
    assert checked.cache.probe(prompt) == 0


def test_the_new_comes_in_even_if_the_old_was_popular() -> None:
    checked, prompt = popular(capacity_prompts=1)
    checked.insert([8] * 64, 0, states=[64])
    assert checked.match([8] * 64).length == 64
    assert checked.match(prompt).length == 0


def test_interior_windows_go_before_leaves_but_not_those_a_leaf_looks_back_on() -> None:
    checked = CheckedCache([A, W], window=5)
    prompt = list(range(16))
    for end in (4, 8, 12, 16):
        checked.insert(prompt[:end], end - 4)
    assert checked.evict(1) == 4 * NBYTES[W]  # one of [0, 4) and [4, 8)
    assert checked.evict(1) == 4 * NBYTES[W]
    assert checked.match(prompt).length == 16  # [8, 12) and [12, 16) are left
    checked.evict(1)
    assert checked.match(prompt).length < 16  # the leaf went, whole
    assert checked.cache.stats.evictions[A] == 1


def test_a_window_goes_right_after_the_last_state_that_looks_back_on_it() -> None:
    checked = CheckedCache([A, W, S], window=6)
    prompt = list(range(30))
    checked.insert(prompt, 0, states=[4, 9, 10, 30])
    node = {node.end: node for node in checked.cache.radix.nodes()}
    # The states at 4 and 9 look back on the window of [0, 4); the one at 10 does not.
    checked.cache.take(node[9], Unit.STATE)
    checked.check()
    assert checked.match(prompt, limit=9).length == 4
    checked.cache.take(node[4], Unit.STATE)
    checked.match([99])
    assert checked.evict(1) == 4 * NBYTES[W]
    assert checked.match(prompt, limit=29).length == 10
    checked.cache.take(node[10], Unit.STATE)
    assert checked.evict(6 * NBYTES[W]) == 6 * NBYTES[W]
    assert checked.match(prompt).length == 30


def test_a_small_state_goes_before_the_leaf_if_it_keeps_a_large_window() -> None:
    checked = CheckedCache([W, S], window=256)
    prompt = list(range(1024))
    checked.insert(prompt, 0, states=[256, 512, 768, 1024])
    assert checked.evict(NBYTES[S] + 1) == NBYTES[S] + 256 * NBYTES[W]
    assert checked.match(prompt).length == 1024


def test_a_split_frees_the_window_that_ends_below_do_not_look_back_on() -> None:
    checked = CheckedCache([A, W], window=3)
    prompt = list(range(10))
    checked.insert(prompt[:8], 0)
    checked.insert(prompt, 8)
    checked.match(prompt[:4])  # splits [0, 8), of which the end at 10 needs only the last token
    checked.check()
    assert checked.evict(1) == 4 * NBYTES[W]
    assert checked.match(prompt).length == 10


def test_ends_far_below_a_split_keep_its_window_until_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pippin.cache.tree.components.MAX_VISITS", 0)
    checked = CheckedCache([A, W], window=3)
    prompt = list(range(10))
    checked.insert(prompt[:8], 0)
    checked.insert(prompt, 8)
    checked.match(prompt[:4])  # splits [0, 8) as before, but nobody looks further down
    checked.check()
    assert checked.evict(1) == 2 * (NBYTES[A] + NBYTES[W])  # the end itself
    checked.lock(prompt[:8])
    checked.check()
    checked.evict(1 << 30)
    assert checked.match(prompt).length == 8


def test_an_end_that_was_too_far_below_one_split_is_taken_off_all_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = CheckedCache([A, W], window=3)
    prompt = list(range(10))
    checked.insert(prompt[:8], 0)
    checked.insert(prompt, 8)
    with monkeypatch.context() as patch:
        patch.setattr("pippin.cache.tree.components.MAX_VISITS", 0)
        checked.match(prompt[:4])  # the end at 10 stays a user of [0, 4)
    checked.match(prompt[:6])  # not of [4, 6), and no longer of [0, 4)
    checked.check()
    assert checked.evict(6 * NBYTES[W]) == 6 * NBYTES[W]
    assert checked.match(prompt).length == 10


@pytest.mark.parametrize("layout", [[A], [A, S], [A, W], [A, W, S]])
def test_what_goes_has_the_least_rank_of_all(
    layout: list[Component], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the ranks of everything that could go, worked out anew each time."""
    monkeypatch.setattr("pippin.cache.tree.eviction.MAX_CANDIDATES", 1_000)
    rng = random.Random(0)
    conversations = [[7] * 10 + [rng.randrange(3) for _ in range(30)] for _ in range(6)]
    checked = CheckedCache(layout, window=5 if W in layout else 0)
    for turn in range(10, 41, 5):
        for tokens in conversations:
            checked.insert(tokens[:turn], 0, states=[turn - 2, turn])
    store = checked.cache
    heaps = {heap.unit: heap for heap in store.queue._heaps}

    def take(node: Node, unit: Unit) -> int:
        nodes = list(store.radix.nodes())
        known = (heap.rank(node) for heap in heaps.values() for node in nodes)
        ranks = [rank for rank in known if rank is not None]
        assert heaps[unit].rank(node) == min(ranks)
        taken.add(unit)
        return store.take(node, unit)

    taken: set[Unit] = set()
    while checked.cache.nbytes:
        checked.lock(rng.choice(conversations), limit=rng.randrange(1, 41))
        checked.unlock(0)
        assert store.queue.evict(rng.choice([1, 60]), take, spare_since=NEVER) > 0
    assert taken == set(heaps)


@pytest.mark.slow
def test_of_many_ranks_that_are_out_of_date_a_few_are_corrected_and_the_least_goes() -> None:
    checked = CheckedCache([A, S])
    prompts = [[token] * 128 for token in range(3 * MAX_CANDIDATES)]
    for prompt in prompts:
        checked.insert(prompt, 0, states=[64, 128])
    for prompt in reversed(prompts):  # the last is the least recent now, but nobody knows yet
        checked.match(prompt)
    for _ in range(3):
        assert checked.evict(1) == NBYTES[S]
    gone = [p[0] for p in prompts if checked.cache.probe(p, limit=127) == 0]
    assert gone == [MAX_CANDIDATES - 1, 2 * MAX_CANDIDATES - 1, 3 * MAX_CANDIDATES - 1]
    checked.evict(1)  # every rank is known now
    assert checked.cache.probe(prompts[-2], limit=127) == 0
