"""What goes first, what locks hold, and what goes with what."""

from __future__ import annotations

import pytest
from naive_cache import NBYTES, A, CheckedCache, S, W

from pippin.cache.eviction import Unit
from pippin.cache.policy import Placement


def test_leaves_go_least_recent_first() -> None:
    checked = CheckedCache([A])
    for token in (1, 2, 3):
        checked.insert([token] * 4, 0)
    checked.match([1] * 4)
    assert checked.evict(1) == 4 * NBYTES[A]
    assert [checked.match([token] * 4).length for token in (1, 2, 3)] == [4, 0, 4]


def test_a_path_goes_from_its_end() -> None:
    checked = CheckedCache([A])
    prompt = list(range(12))
    for end in (4, 8, 12):
        checked.insert(prompt[:end], end - 4)
    checked.evict(1)
    assert checked.match(prompt).length == 8


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


def test_evicting_the_last_state_frees_the_tail_it_carried() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1] * 8, 0, states=[4])
    checked.evict(1 << 30)
    assert checked.cache.num_tokens == 0


def test_state_only_leaves_vanish_with_their_state() -> None:
    checked = CheckedCache([S])
    checked.insert([1] * 8, 0, states=[4, 8])
    checked.evict(1)
    assert checked.cache.num_tokens in (4, 8)
    checked.evict(1)
    assert checked.cache.num_tokens == 0


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


def test_a_window_takes_the_states_that_need_it() -> None:
    checked = CheckedCache([A, W, S], window=6)
    prompt = list(range(20))
    checked.insert(prompt[:4], 0)
    checked.insert(prompt, 4, states=[9, 10, 20])
    # The window of [0, 4) serves the state at 9, but not the one at 10.
    checked.evict(NBYTES[S])  # the state at 10 saves one token only
    checked.insert(prompt[:10], 10, states=[10])
    node = next(node for node in checked.cache._tree.nodes() if node.end == 4)
    checked.cache._store.take(node, Unit.WINDOW)
    assert {len(prefix) for prefix in checked.ledger.held(S)} == {10, 20}
    checked.check()


def test_locked_paths_windows_and_states_stay() -> None:
    checked = CheckedCache([A, W, S], window=4)
    prompt = list(range(12))
    for end in (4, 8, 12):
        checked.insert(prompt[:end], end - 4, states=[end])
    checked.lock(prompt)
    checked.evict(1 << 30)
    checked.check()
    assert checked.match(prompt).length == 12
    assert checked.ledger.held(S) == {tuple(prompt)}
    checked.unlock(0)
    checked.evict(1 << 30)
    assert checked.cache.num_tokens == 0


def test_two_locks_need_two_unlocks() -> None:
    checked = CheckedCache([A])
    checked.insert([1] * 4, 0)
    checked.lock([1] * 4)
    checked.lock([1] * 4)
    checked.unlock(0)
    assert checked.evict(1) == 0
    checked.unlock(0)
    assert checked.evict(1) == 4 * NBYTES[A]


def test_a_split_above_the_lock_keeps_its_window_held_and_frees_all_of_it() -> None:
    checked = CheckedCache([A, W], window=3)
    prompt = list(range(8))
    checked.insert(prompt, 0)
    checked.lock(prompt)
    checked.insert([0, 1, 9], 0)  # splits the locked node far above its last three tokens
    checked.check()
    checked.unlock(0)
    checked.check()
    checked.evict(1 << 30)
    assert checked.cache.num_tokens == 0


def test_unlocking_twice_is_loud() -> None:
    checked = CheckedCache([A])
    checked.insert([1], 0)
    lock = checked.cache.lock(checked.match([1]))
    checked.cache.unlock(lock)
    with pytest.raises(AssertionError, match="is not held"):
        checked.cache.unlock(lock)


def test_locking_what_was_evicted_is_loud() -> None:
    checked = CheckedCache([A])
    checked.insert([1], 0)
    match = checked.match([1])
    checked.evict(1)
    with pytest.raises(AssertionError, match="stale"):
        checked.cache.lock(match)


def test_flush_keeps_what_is_locked() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1] * 8, 0, states=[4, 8])
    checked.insert([2] * 8, 0, states=[8])
    checked.lock([1] * 6)
    checked.flush()
    checked.check()
    assert checked.match([1] * 8).length == 4
    assert checked.cache.num_tokens == 4


def test_lowering_the_ceiling_evicts() -> None:
    checked = CheckedCache([A])
    for token in range(5):
        checked.insert([token] * 4, 0)
    checked.set_capacity(9 * NBYTES[A])
    assert checked.cache.num_tokens == 8


def test_the_eviction_queue_does_not_grow_with_what_is_gone() -> None:
    checked = CheckedCache([A, S])
    for round_number in range(1_500):
        checked.cache.insert([round_number, 1], 0, {A: checked.ledger.kv(A, [0, 1], 0)}, {})
        checked.cache.flush()
    assert checked.cache.num_tokens == 0
    assert len(checked.cache._store.queue) < 1_100


def test_report_tells_what_is_held_and_what_it_was_good_for() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(70))
    checked.insert(prompt, 0, states=[64, 70])
    checked.lock(prompt, limit=69)
    report = checked.cache.report()
    assert report["tokens"] == 70
    assert report["component_bytes"] == {"attention": 70 * NBYTES[A], "state": 2 * NBYTES[S]}
    assert report["hit_rate"] == 64 / 70
    assert report["checkpoints"]["grid"] == {  # type: ignore[index]
        "placed": 1,
        "used": 1,
        "tokens_saved": 64,
        "evicted": 0,
    }
    assert report["recent_paths"][0]["last_tokens"] == prompt[64:]  # type: ignore[index]
