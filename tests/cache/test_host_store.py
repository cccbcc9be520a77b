"""The store in the host's memory, against a dictionary, and against bits that change."""

from __future__ import annotations

import numpy as np
import pytest

from pippin.cache import entries as blocks
from pippin.cache.entries import ArraySpec, Bytes, Entry, Key
from pippin.cache.host_store import HostStore, area_bytes
from pippin.cache.tiers.tier_io import plain_memory
from pippin.types import Component

MAX_BYTES = 16_384
ENTRY_BYTES = 1_000


def make_entry(name: int, nbytes: int) -> Entry:
    """Two arrays, so that they must be told apart."""
    key = Key(name.to_bytes(32, "little"), Component.STATE, 0)
    specs = (
        ArraySpec("a", "uint8", (nbytes // 3,)),
        ArraySpec("b", "uint8", (nbytes - nbytes // 3,)),
    )
    return Entry(key, bytes(32), 0, np.arange(4, dtype=np.int32).tobytes(), specs)


def content(entry: Entry) -> list[Bytes]:
    rng = np.random.default_rng(int.from_bytes(entry.key.chain, "little"))
    return [rng.integers(0, 256, spec.nbytes, dtype=np.uint8) for spec in entry.arrays]


def assert_reads(store: HostStore, entry: Entry) -> None:
    into = entry.new_buffers()
    assert store.read([entry.key], [into]) == [True]
    assert [part.tobytes() for part in into] == [part.tobytes() for part in content(entry)]


def test_what_is_used_all_the_time_stays() -> None:
    store = HostStore(MAX_BYTES, plain_memory, ENTRY_BYTES)
    dear = make_entry(0, 200)  # beside others in its area, which make room
    store.write(dear, content(dear))
    for name in range(1, 300):
        entry = make_entry(name, 200)
        store.write(entry, content(entry))
        store.touch([dear.key])
    assert_reads(store, dear)
    assert store.counters().evicted > 50


def test_a_changed_bit_costs_its_entry_and_is_counted_once() -> None:
    for array in (0, 1):
        store = HostStore(MAX_BYTES, plain_memory, ENTRY_BYTES)
        entries = [make_entry(name, 700) for name in range(3)]
        for entry in entries:
            store.write(entry, content(entry))
        hurt = entries[1]
        kept = store._places[hurt.key]
        kept.area.memory[kept.at + (699 if array else 0)] ^= 4
        for _ in range(2):
            assert store.read([hurt.key], [hurt.new_buffers()]) == [False]
        assert store.counters().damaged == 1
        assert store.take_lost() == [hurt.key]
        for entry in (entries[0], entries[2]):
            assert_reads(store, entry)
        assert store.write(hurt, content(hurt))
        assert_reads(store, hurt)


def test_large_entries_are_copied_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1_000)
    monkeypatch.setattr(blocks, "ALONE_BYTES", 0)
    store = HostStore(1 << 17, plain_memory, 1 << 13)
    entries = [make_entry(name, 7_500) for name in range(3)]
    for entry in entries:
        store.write(entry, content(entry))
        assert_reads(store, entry)
    kept = store._places[entries[2].key]
    kept.area.memory[kept.at + 7_499] ^= 1
    into = [entry.new_buffers() for entry in entries]
    assert store.read([entry.key for entry in entries], into) == [True, True, False]


def test_what_is_being_read_stays_where_it_is() -> None:
    store = HostStore(MAX_BYTES, plain_memory, ENTRY_BYTES)
    first = make_entry(0, 900)
    store.write(first, content(first))
    pinned = store.pin(first.key)
    assert pinned is not None
    for name in range(1, 100):
        entry = make_entry(name, 900)
        assert store.write(entry, content(entry))
    store.forget([first.key])  # also if nobody wants it any more
    for name in range(100, 120):
        store.write(make_entry(name, 900), content(make_entry(name, 900)))
    found = [array.tobytes() for array in pinned.arrays]
    assert found == [part.tobytes() for part in content(first)]
    store.write(first, content(first))
    pinned.unpin()
    for name in range(120, 200):
        entry = make_entry(name, 900)
        store.write(entry, content(entry))
    assert first.key not in store


def test_where_everything_is_being_read_nothing_is_written() -> None:
    taken: list[int] = []

    def allocate(nbytes: int) -> Bytes:
        taken.append(nbytes)
        return plain_memory(nbytes)

    store = HostStore(MAX_BYTES, allocate, ENTRY_BYTES)
    assert sum(taken) <= MAX_BYTES
    for name in range(100):
        entry = make_entry(name, 900)
        store.write(entry, content(entry))
    pinned_entries = [store.pin(entry.key) for entry in store.entries()]
    more = make_entry(100, 900)
    assert not store.write(more, content(more))
    for pinned in pinned_entries:
        assert pinned is not None
        pinned.unpin()
    assert store.write(more, content(more))


@pytest.mark.parametrize("max_bytes", [1 << 16, 3 << 20, 10**9, 64 * 10**9])
def test_areas_are_powers_of_two_and_leave_little_over(max_bytes: int) -> None:
    size = area_bytes(max_bytes, 2_000)
    assert size.bit_count() == 1
    assert size >= 2_000
    assert max_bytes // size >= 16
    assert max_bytes % size < max_bytes / 16


def test_a_store_that_would_hold_no_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1,000 bytes hold no entry: use 2,048 or more"):
        HostStore(1_000, plain_memory, 2_000)
