"""What locks hold, how many bytes that leaves to evict, and that the two never disagree."""

from __future__ import annotations

import pytest
from naive_cache import A, CheckedCache, S, W


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
