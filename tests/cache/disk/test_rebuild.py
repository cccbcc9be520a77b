"""Chain keys do not depend on boundaries, and paths are found again from entries alone."""

from __future__ import annotations

import random

import numpy as np
from disk_builders import FINGERPRINT, ROOT, kv_entry, state_entry, tokens

from pippin.cache.entries import Chain, Entry, rebuild


def paths(entries: list[Entry]) -> dict[bytes, tuple[int, ...]]:
    found, orphans = rebuild(entries, FINGERPRINT)
    assert not orphans
    return {
        placed.entry.key.chain: tuple(np.frombuffer(placed.path_tokens(), np.int32).tolist())
        for placed in found
    }


def test_a_chain_key_says_tokens_order_and_model() -> None:
    keys = [
        ROOT.key,
        ROOT.extended(tokens(1, 2)).key,
        ROOT.extended(tokens(2, 1)).key,
        ROOT.extended(tokens(1)).key,
        Chain(b"another").extended(tokens(1, 2)).key,
    ]
    assert len(set(keys)) == len(keys)


def test_a_chain_key_says_the_salt_and_a_root_is_enough_to_go_on_from() -> None:
    salted, other = Chain(FINGERPRINT, b"mine"), Chain(FINGERPRINT, b"yours")
    ends = [chain.extended(tokens(1, 2)) for chain in (ROOT, salted, other)]
    elsewhere = Chain(b"another", b"mine")
    keys = [chain.key for chain in (ROOT, salted, other, elsewhere, *ends)]
    assert len(set(keys)) == len(keys)
    assert Chain.of_root(salted.key).extended(tokens(1, 2)).key == ends[1].key
    assert Chain(FINGERPRINT, b"").extended(tokens(1, 2)).key == ends[0].key


def test_paths_of_every_salt_are_found_again_and_stay_apart() -> None:
    """The same tokens under three roots; a path whose tokens are not its name's leads nowhere."""
    roots = [ROOT, Chain(FINGERPRINT, b"mine"), Chain(FINGERPRINT, b"yours")]
    entries = []
    for root in roots:
        kv, end = kv_entry(root, [1, 2, 3])
        entries += [state_entry(end, [4])[0], kv]
    found, orphans = rebuild(entries, FINGERPRINT)
    assert not orphans
    assert [placed.root for placed in found].count(roots[1].key) == 2
    assert {placed.root for placed in found} == {root.key for root in roots}
    kv = entries[3]
    lying = Entry(kv.key, kv.parent, kv.start, tokens(1, 9, 3), kv.arrays)
    moved = Entry(kv.key, roots[2].key, kv.start, kv.tokens, kv.arrays)
    for false in (lying, moved):
        assert rebuild([false], FINGERPRINT)[1] == [kv.key]


def test_what_hangs_on_nothing_is_an_orphan() -> None:
    kv, end = kv_entry(ROOT, [1, 2])
    below, _ = kv_entry(end, [3])
    assert rebuild([below], FINGERPRINT)[1] == [below.key]
    assert rebuild([kv, below], b"another model")[0] == []


def test_tokens_that_are_not_those_of_the_name_lead_nowhere() -> None:
    kv, end = kv_entry(ROOT, [1, 2])
    below, _ = kv_entry(end, [3])
    lying = Entry(kv.key, kv.parent, kv.start, tokens(1, 9), kv.arrays)
    _, orphans = rebuild([lying, below], FINGERPRINT)
    assert set(orphans) == {kv.key, below.key}


def test_random_paths_with_random_boundaries_are_found_again() -> None:
    rng = random.Random(5)
    sequences: list[list[int]] = [[]]
    entries: dict[bytes, Entry] = {}
    expected: dict[bytes, tuple[int, ...]] = {}
    for _ in range(300):
        before = rng.choice(sequences)
        begin = before[: rng.randint(0, len(before))]
        own = [rng.randrange(3) for _ in range(rng.randint(1, 9))]
        entry, chain = kv_entry(ROOT.extended(tokens(*begin)), own)
        entries[chain.key] = entry
        expected[chain.key] = (*begin, *own)
        sequences.append([*begin, *own])
    shuffled = list(entries.values())
    rng.shuffle(shuffled)
    assert paths(shuffled) == expected
