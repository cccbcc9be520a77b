"""What an insert keeps, fills in and gives back."""

from __future__ import annotations

import numpy as np
import pytest
from naive_cache import NBYTES, A, CheckedCache, S, W


def test_chunks_of_a_prompt_join_up() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(100))
    for start, end in [(0, 40), (40, 80), (80, 100)]:
        result = checked.insert(prompt[:end], start, states=[end])
        assert (result.length, result.inserted) == (end, True)
    assert checked.match(prompt).length == 100


def test_a_second_copy_is_released() -> None:
    checked = CheckedCache([A, W, S], window=4)
    prompt = list(range(10))
    checked.insert(prompt, 0, states=[5, 10])
    nbytes = checked.cache.nbytes
    checked.insert(prompt, 0, states=[5, 10])
    assert checked.cache.nbytes == checked.ledger.nbytes == nbytes
    assert checked.cache.stats.bytes_duplicate == nbytes


def test_only_the_new_part_of_a_chunk_is_kept() -> None:
    checked = CheckedCache([A])
    checked.insert([1, 2, 3, 4], 0)
    checked.insert([1, 2, 3, 9, 9], 0)
    assert checked.cache.radix.num_tokens == 6
    assert checked.cache.stats.bytes_duplicate == 3 * NBYTES[A]


def test_a_gap_before_the_chunk_keeps_nothing() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1, 2, 3], 0)
    result = checked.insert([1, 2, 3, 4, 5, 6], 5, states=[6])
    assert (result.gap, result.inserted, result.length) == (2, False, 0)
    assert checked.cache.radix.num_tokens == 3
    assert checked.cache.stats.gaps == 1


def test_a_state_in_the_middle_of_a_node_splits_it() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(10))
    checked.insert(prompt, 0, states=[10])
    checked.insert(prompt[:6], 6, states=[6])
    assert checked.match(prompt, limit=9).length == 6
    assert checked.match(prompt).length == 10


def test_a_state_beyond_its_kv_is_released() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1, 2, 3], 0)
    checked.insert([1, 2, 3, 4], 3, states=[4], kv=[])
    assert checked.cache.component_bytes[S] == 0


def test_states_held_back_may_come_with_a_later_chunk() -> None:
    checked = CheckedCache([A, S])
    prompt = list(range(10))
    checked.insert(prompt[:4], 0)
    checked.insert(prompt, 4, states=[3, 7])
    assert checked.match(prompt, limit=6).length == 3


def test_an_evicted_window_is_filled_again() -> None:
    checked = CheckedCache([A, W], window=2)
    prompt = list(range(10))
    checked.insert(prompt[:8], 0)
    checked.insert(prompt, 8)
    checked.evict(1)
    assert checked.match(prompt, limit=8).length == 0
    checked.insert(prompt, 6)
    assert checked.match(prompt, limit=8).length == 8


def test_a_full_cache_makes_room_for_the_new() -> None:
    checked = CheckedCache([A], capacity=10 * NBYTES[A])
    checked.insert([1] * 6, 0)
    checked.insert([2] * 6, 0)
    assert checked.match([1] * 6).length == 0
    assert checked.match([2] * 6).length == 6


def test_what_does_not_fit_is_given_back_not_the_ceiling() -> None:
    checked = CheckedCache([A], capacity=10 * NBYTES[A])
    held = [1] * 8
    checked.insert(held, 0)
    checked.lock(held)
    result = checked.insert([2] * 6, 0)
    assert result.length == 0
    assert checked.cache.nbytes == 8 * NBYTES[A]
    assert checked.match(held).length == 8


def test_too_long_a_prompt_keeps_what_fits_of_its_beginning() -> None:
    checked = CheckedCache([A], capacity=10 * NBYTES[A])
    prompt = list(range(16))
    checked.insert(prompt[:8], 0)
    result = checked.insert(prompt, 8)
    assert result.length == checked.match(prompt).length == 8


def test_a_fill_that_does_not_fit_into_a_locked_node_is_given_back() -> None:
    checked = CheckedCache([A, W], window=4, capacity=8 * NBYTES[A])
    prompt = list(range(8))
    result = checked.insert(prompt, 0, kv=[A])
    checked.lock_inserted(prompt, result)
    checked.insert(prompt, 0, kv=[W])
    assert checked.cache.component_bytes == {A: 8 * NBYTES[A], W: 0}
    checked.check()


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_a_payload_of_the_wrong_length_is_loud(num_tokens: int) -> None:
    checked = CheckedCache([A])
    payload = checked.ledger.kv(A, list(range(num_tokens)), 0)
    with pytest.raises(AssertionError, match=rf"covers {num_tokens} tokens, \[0, 4\) is 4"):
        checked.cache.insert(np.arange(4), 0, {A: payload}, {})
