"""The canary finds what was disturbed, and leaves alone what was not."""

from __future__ import annotations

import logging
import random
from typing import Literal

import numpy as np
import pytest
from naive_cache import A, Ledger, S

from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import (
    BASE,
    LEAST_POWERS,
    SEED,
    CacheCorruption,
    Canary,
    _mix,
    chain_hashes,
)
from pippin.cache.tree.radix import as_tokens


def filled(canary: Canary | None) -> tuple[PrefixCache, Ledger, list[int]]:
    cache, ledger = PrefixCache([A, S], capacity_bytes=1 << 30, canary=canary), Ledger()
    tokens = list(range(100, 120))
    states = {p: ledger.state(tokens, p) for p in (8, 20)}
    cache.insert(np.array(tokens), 0, {A: ledger.kv(A, tokens, 0)}, states)
    fork = [*tokens[:12], 1, 2]
    cache.insert(np.array(fork), 12, {A: ledger.kv(A, fork, 12)}, {14: ledger.state(fork, 14)})
    return cache, ledger, tokens


def test_chain_hash_equals_its_recurrence_token_by_token() -> None:
    tokens = as_tokens([random.Random(0).randrange(150_000) for _ in range(300)])
    h, expected = SEED, []
    for position, token in enumerate(tokens.tolist(), start=5):
        mixed = _mix(np.array([token | position << 32], dtype=np.uint64))
        h = (h * BASE + int(mixed[0]) * 1) % (1 << 64)
        expected.append(h)
    assert chain_hashes(tokens, 5, SEED).tolist() == expected


def test_chain_goes_on_from_its_predecessor() -> None:
    tokens = as_tokens(range(50))
    whole = chain_hashes(tokens, 0, SEED)
    assert (chain_hashes(tokens[20:], 20, int(whole[19])) == whole[20:]).all()


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_sound_entries_pass_through_splits_and_forks(mode: Literal["log", "raise"]) -> None:
    canary = Canary(mode)
    cache, _, tokens = filled(canary)
    assert cache.match(np.array(tokens)).length == 20
    assert cache.match(np.array([*tokens[:12], 1, 2])).length == 14
    assert cache.sweep(100) == 0
    cache.check_when_idle()
    assert canary.checked > 5
    assert canary.faults == 0


@pytest.mark.parametrize("what", ["tokens", "chain", "payload"])
def test_a_disturbed_entry_is_caught_on_restore_and_by_the_sweep(what: str) -> None:
    cache, ledger, tokens = filled(Canary("raise"))
    node = cache.match(np.array(tokens)).node
    if what == "tokens":
        assert node.parent is not None
        node.parent.tokens, kept = node.parent.tokens[::-1], node.parent.tokens
        assert kept != node.parent.tokens
    elif what == "chain":
        assert node.chain is not None
        node.chain[1] ^= np.uint64(1)
    else:
        next(piece for piece in ledger.live.values() if piece is node.payloads[2]).contents ^= 1
    with pytest.raises(CacheCorruption, match=r"cache entry over tokens \["):
        cache.sweep(100)
    if what != "tokens":  # those are simply not found any more
        with pytest.raises(CacheCorruption):
            cache.match(np.array(tokens))


def test_log_mode_reports_and_recomputes(caplog: pytest.LogCaptureFixture) -> None:
    canary = Canary("log")
    cache, _, tokens = filled(canary)
    node = cache.match(np.array(tokens)).node
    assert node.chain is not None
    node.chain[0] ^= np.uint64(1)
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
    assert match.node.chain is None
    assert cache.sweep(10) == 0


@pytest.mark.parametrize("mode", ["log", "raise"])
def test_self_test_passes(mode: Literal["log", "raise"]) -> None:
    Canary(mode).self_test()


def test_self_test_fails_for_a_blind_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary("raise")
    monkeypatch.setattr(canary, "_fault", lambda node, expected: None)
    with pytest.raises(CacheCorruption, match="not noticed"):
        canary.self_test()


def test_self_test_fails_for_a_canary_blind_to_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    canary = Canary("raise")
    monkeypatch.setattr(canary, "seal", lambda node, index: None)
    with pytest.raises(CacheCorruption, match="changed bytes: not noticed"):
        canary.self_test()


def test_idle_checks_count_everything_again(caplog: pytest.LogCaptureFixture) -> None:
    for canary in (Canary("log"), Canary("raise")):
        cache, _, _ = filled(canary)
        cache.radix.num_tokens += 1
        if canary.mode == "raise":
            with pytest.raises(CacheCorruption, match=r"does not add up: \d+ tokens, saw \d+"):
                cache.check_when_idle()
        else:
            cache.check_when_idle()
            assert "the cache does not add up" in caplog.text
        assert canary.faults == 1


def test_an_empty_tree_can_be_swept() -> None:
    cache = PrefixCache([A], capacity_bytes=1, canary=Canary("raise"))
    assert cache.sweep(10) == 0


def test_chains_longer_than_any_before_are_right() -> None:
    """Powers are kept, and computed again where more are needed."""
    tokens = as_tokens(range(3 * LEAST_POWERS))
    whole = chain_hashes(tokens, 0, SEED)
    cut = LEAST_POWERS - 1
    first = chain_hashes(tokens[:cut], 0, SEED)
    assert (whole[:cut] == first).all()
    assert (chain_hashes(tokens[cut:], cut, int(first[-1])) == whole[cut:]).all()
