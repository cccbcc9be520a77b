"""What an insert keeps, fills in and gives back."""

from __future__ import annotations

import numpy as np
import pytest
from naive_cache import NBYTES, A, CheckedCache, S, W


def test_a_second_copy_is_released() -> None:
    checked = CheckedCache([A, W, S], window=4)
    prompt = list(range(10))
    checked.insert(prompt, 0, states=[5, 10])
    nbytes = checked.cache.nbytes
    checked.insert(prompt, 0, states=[5, 10])
    assert checked.cache.nbytes == checked.ledger.nbytes == nbytes
    assert checked.cache.stats.bytes_duplicate == nbytes


def test_a_gap_before_the_chunk_keeps_nothing() -> None:
    checked = CheckedCache([A, S])
    checked.insert([1, 2, 3], 0)
    result = checked.insert([1, 2, 3, 4, 5, 6], 5, states=[6])
    assert (result.gap, result.inserted, result.length) == (2, False, 0)
    assert checked.cache.radix.num_tokens == 3
    assert checked.cache.stats.gaps == 1


def test_what_does_not_fit_is_given_back_not_the_ceiling() -> None:
    checked = CheckedCache([A], capacity=10 * NBYTES[A])
    held = [1] * 8
    checked.insert(held, 0)
    checked.lock(held)
    result = checked.insert([2] * 6, 0)
    assert result.length == 0
    assert checked.cache.nbytes == 8 * NBYTES[A]
    assert checked.match(held).length == 8


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_a_payload_of_the_wrong_length_is_loud(num_tokens: int) -> None:
    checked = CheckedCache([A])
    payload = checked.ledger.kv(A, list(range(num_tokens)), 0)
    with pytest.raises(AssertionError, match=rf"covers {num_tokens} tokens, \[0, 4\) is 4"):
        checked.cache.insert(np.arange(4), 0, {A: payload}, {})
