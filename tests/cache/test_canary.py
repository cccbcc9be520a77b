"""The canary finds what was disturbed, and leaves alone what was not."""

from __future__ import annotations

import logging
from typing import Literal

import numpy as np
import pytest
from naive_cache import A, Ledger, S

from integrity import sweep
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import SEED, CacheCorruption, Canary, hash_on
from pippin.cache.tree.radix import as_tokens


def filled(canary: Canary | None) -> tuple[PrefixCache, Ledger, list[int]]:
    cache, ledger = PrefixCache([A, S], capacity_bytes=1 << 30, canary=canary), Ledger()
    tokens = list(range(100, 120))
    states = {p: ledger.state(tokens, p) for p in (8, 20)}
    cache.insert(np.array(tokens), 0, {A: ledger.kv(A, tokens, 0)}, states)
    fork = [*tokens[:12], 1, 2]
    cache.insert(np.array(fork), 12, {A: ledger.kv(A, fork, 12)}, {14: ledger.state(fork, 14)})
    return cache, ledger, tokens


def test_a_hash_goes_on_wherever_nodes_end() -> None:
    tokens = as_tokens(range(50)).tobytes()
    whole = hash_on(SEED, tokens)
    assert all(hash_on(hash_on(SEED, tokens[:at]), tokens[at:]) == whole for at in (0, 4, 80, 200))


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_sound_entries_pass_through_splits_and_forks(mode: Literal["log", "raise"]) -> None:
    canary = Canary(mode)
    cache, _, tokens = filled(canary)
    assert cache.match(np.array(tokens)).length == 20
    assert cache.match(np.array([*tokens[:12], 1, 2])).length == 14
    assert sweep(cache) == 0
    assert canary.checked > 5
    assert canary.faults == 0


@pytest.mark.parametrize("what", ["tokens", "hash", "payload"])
def test_a_disturbed_entry_is_caught_on_restore_and_by_the_sweep(what: str) -> None:
    cache, ledger, tokens = filled(Canary("raise"))
    node = cache.match(np.array(tokens)).node
    if what == "tokens":
        assert node.parent is not None
        node.parent.tokens, kept = node.parent.tokens[::-1], node.parent.tokens
        assert kept != node.parent.tokens
    elif what == "hash":
        assert node.path_hash is not None
        node.path_hash ^= 1
    else:
        next(piece for piece in ledger.live.values() if piece is node.payloads[2]).contents ^= 1
    with pytest.raises(CacheCorruption, match=r"cache entry over tokens \["):
        sweep(cache)
    if what != "tokens":  # those are simply not found any more
        with pytest.raises(CacheCorruption):
            cache.match(np.array(tokens))


def test_log_mode_reports_and_recomputes(caplog: pytest.LogCaptureFixture) -> None:
    canary = Canary("log")
    cache, _, tokens = filled(canary)
    node = cache.match(np.array(tokens)).node
    assert node.path_hash is not None
    node.path_hash ^= 1
    with caplog.at_level(logging.ERROR):
        match = cache.match(np.array(tokens))
    assert (match.length, dict(match.payloads)) == (0, {})
    assert canary.faults == 1
    assert "holds another sequence" in caplog.text


@pytest.mark.parametrize("canary", [None, Canary("off")])
def test_off_costs_nothing_and_breaks_nothing(canary: Canary | None) -> None:
    cache, _, tokens = filled(canary)
    match = cache.match(np.array(tokens))
    assert match.length == 20
    assert match.node.path_hash is None


def test_a_split_does_not_cover_up_what_changed_before() -> None:
    """The part that was cut off is not hashed from the tokens that it has by now."""
    canary = Canary("log")
    cache, _, tokens = filled(canary)
    tokens[2] = 9
    node = cache.radix.walk(as_tokens(range(100, 108)))[0][0]
    node.tokens = as_tokens(tokens[:8]).tobytes()
    assert not canary.verify_restore(as_tokens(tokens[:5]), cache.split(node, 5))


@pytest.mark.parametrize("fields", [("start",), ("end",), ("start", "end")], ids=str)
def test_a_node_that_says_other_positions_is_a_fault(fields: tuple[str, ...]) -> None:
    canary = Canary("log")
    cache, _, tokens = filled(canary)
    end = cache.match(np.array(tokens)).node
    for change in (-1, 1):
        for field in fields:
            setattr(end, field, getattr(end, field) + change)
        assert not canary.verify_restore(as_tokens(tokens), end)
        for field in fields:
            setattr(end, field, getattr(end, field) - change)
    assert canary.verify_restore(as_tokens(tokens), end)
