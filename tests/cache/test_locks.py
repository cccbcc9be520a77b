"""What locks hold, how many bytes that leaves to evict, and that the two never disagree."""

from __future__ import annotations

import pytest
from naive_cache import NBYTES, A, CheckedCache, S, W


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
    assert checked.cache.radix.num_tokens == 0


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
    assert checked.cache.radix.num_tokens == 0


def test_unlocking_twice_is_loud() -> None:
    checked = CheckedCache([A])
    checked.insert([1], 0)
    lock = checked.cache.lock(checked.match([1]))
    checked.cache.unlock(lock)
    with pytest.raises(AssertionError, match="is not locked"):
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
    assert checked.cache.radix.num_tokens == 4


def test_a_locked_path_keeps_its_attention_and_frees_what_no_restore_there_needs() -> None:
    checked = CheckedCache([A, W, S], window=4)
    prompt = list(range(12))
    checked.insert(prompt, 0, states=[4, 8, 12])
    checked.lock(prompt)
    checked.check()
    # The states at 4 and 8, and the windows of [0, 4) and [4, 8); all attention KV stays.
    assert checked.cache.evictable_bytes == 2 * NBYTES[S] + 8 * NBYTES[W]
    checked.check_by_evicting_a_copy()


def test_locks_that_share_a_path_count_it_once() -> None:
    checked = CheckedCache([A])
    checked.insert([1, 2, 3, 4], 0)
    checked.insert([1, 2, 5, 6, 7], 2)
    assert checked.cache.evictable_bytes == checked.cache.nbytes == 7 * NBYTES[A]
    checked.lock([1, 2, 3, 4])
    assert checked.cache.evictable_bytes == 3 * NBYTES[A]
    checked.lock([1, 2, 5, 6, 7])
    assert checked.cache.evictable_bytes == 0
    checked.unlock(0)
    assert checked.cache.evictable_bytes == 2 * NBYTES[A]
    checked.unlock(0)
    assert checked.cache.evictable_bytes == 7 * NBYTES[A]


def test_a_lock_that_moves_down_its_path_lets_go_of_the_state_it_had() -> None:
    checked = CheckedCache([A, S])
    result = checked.insert([1] * 4, 0, states=[4])
    checked.lock_inserted([1] * 4, result)
    assert checked.cache.evictable_bytes == 0
    result = checked.insert([1] * 8, 4, states=[8])
    assert checked.cache.evictable_bytes == 4 * NBYTES[A] + NBYTES[S]
    checked.lock_inserted([1] * 8, result)
    checked.unlock(0)
    assert checked.cache.evictable_bytes == NBYTES[S]  # the one at 4
    checked.check_by_evicting_a_copy()


def test_what_is_filled_into_a_locked_node_is_locked_at_once() -> None:
    checked = CheckedCache([A, W, S], window=4)
    result = checked.insert([1] * 8, 0, kv=[A])
    checked.lock_inserted([1] * 8, result)
    checked.insert([1] * 8, 0, states=[8])
    assert checked.cache.evictable_bytes == 0
    checked.unlock(0)
    assert checked.cache.evictable_bytes == checked.cache.nbytes


def test_a_lock_holds_the_window_of_a_leaf_as_far_as_the_leaf_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else a window could neither go nor be told apart from one that can."""
    monkeypatch.setattr("pippin.cache.tree.components.MAX_VISITS", 0)
    checked = CheckedCache([A, W], window=3)
    checked.insert(list(range(8)), 0)
    checked.match(list(range(4)))  # the leaf still counts on both halves
    checked.lock(list(range(8)))
    checked.check_by_evicting_a_copy()
    checked.unlock(0)
    checked.check_by_evicting_a_copy()


def test_asking_what_could_go_changes_nothing() -> None:
    checked = CheckedCache([A, S])
    for token in range(5):
        checked.insert([token] * 8, 0, states=[4, 8])
    before, version = checked.cache.report(), checked.cache.version
    assert checked.cache.evictable_bytes == checked.cache.nbytes
    assert (checked.cache.report(), checked.cache.version) == (before, version)


def test_the_version_changes_when_a_probe_may_and_not_otherwise() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1] * 8, 0, states=[4, 8])
    version = checked.cache.version
    checked.lock([1] * 6)
    checked.unlock(0)
    checked.insert([1] * 8, 0, states=[4, 8])  # all of it is there
    checked.evict(0)
    assert checked.cache.version == version
    checked.insert([1] * 8, 8, states=[6])
    inserted = checked.cache.version
    assert inserted != version
    checked.evict(1)
    assert checked.cache.version not in (version, inserted)
