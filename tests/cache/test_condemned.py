"""What is condemned is matched by nobody, and goes with the last lock on it."""

from __future__ import annotations

import numpy as np
import pytest
from naive_cache import A, Ledger, S

from integrity import check_integrity
from pippin.cache.prefix_cache import PrefixCache
from pippin.types import Component


def filled() -> tuple[PrefixCache, list[int]]:
    cache, ledger = PrefixCache([A, S], capacity_bytes=1 << 30), Ledger()
    tokens = list(range(100, 120))
    states = {p: ledger.state(tokens, p) for p in (8, 14, 20)}
    cache.insert(np.array(tokens), 0, {A: ledger.kv(A, tokens, 0)}, states)
    return cache, tokens


def test_what_nobody_holds_goes_at_once_with_all_below() -> None:
    cache, tokens = filled()
    cache.condemn(np.array(tokens[:14]), A, 8)
    assert cache.probe(np.array(tokens)) == 8
    assert cache.num_cached(np.array(tokens)) == 8
    assert cache.stats.damaged == 1
    check_integrity(cache)


@pytest.mark.parametrize(("component", "left"), [(A, 8), (S, 20)])
def test_what_is_held_goes_with_its_last_lock(component: Component, left: int) -> None:
    cache, tokens = filled()
    ids = np.array(tokens)
    locks = [cache.lock(cache.match(ids[:14])) for _ in range(2)]
    cache.condemn(ids[:14], component, 8)
    for lock in locks:
        assert cache.probe(ids) == 8
        assert cache.match(ids).length == 8
        assert cache.num_cached(ids) == 20
        check_integrity(cache)
        cache.unlock(lock)
    assert cache.probe(ids) == left
    assert cache.probe(ids[:14]) == 8
    assert cache.stats.damaged == 1
    check_integrity(cache)


def test_both_parts_of_a_node_that_is_split_stay_condemned() -> None:
    cache, tokens = filled()
    ids = np.array(tokens)
    lock = cache.lock(cache.match(ids))
    cache.condemn(ids[:14], A, 8)
    fork = Ledger()
    other = [*tokens[:11], 1, 2]
    cache.insert(np.array(other), 11, {A: fork.kv(A, other, 11)}, {13: fork.state(other, 13)})
    assert cache.probe(np.array(other)) == 8
    check_integrity(cache)
    cache.unlock(lock)
    assert cache.probe(np.array(other)) == 8
    assert cache.num_cached(ids) == 8
    check_integrity(cache)
