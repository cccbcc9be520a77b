"""Random use of a store, beside a dictionary that does the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from disk_builders import FINGERPRINT, ROOT, Unsynced, finds, kv_entry, payload, state_entry

from memory_store import MemoryStore
from pippin.cache.disk.disk_store import open_store
from pippin.cache.entries import Entry, EntryStore, Key, rebuild
from pippin.cache.host_store import HostStore
from pippin.cache.tiers.tier_io import plain_memory


class NaiveStore:
    """What must be there: all that was written, less what was forgotten or given up."""

    def __init__(self) -> None:
        self.kept: dict[Key, Entry] = {}

    def check(self, store: EntryStore) -> None:
        for key in store.take_lost():
            del self.kept[key]
        assert {entry.key: entry for entry in store.entries()} == self.kept
        counters = store.counters()
        assert counters.entries == len(self.kept)
        assert counters.bytes <= counters.max_bytes
        assert (counters.damaged, counters.write_errors, counters.read_errors) == (0, 0, 0)


def use_at_random(store: EntryStore, naive: NaiveStore, rng: random.Random, times: int) -> None:
    known: list[Entry] = list(naive.kept.values())
    chain = ROOT
    for number in range(times):
        some = rng.sample(known, min(len(known), rng.randrange(1, 9)))
        match rng.randrange(12):
            case 0:
                store.forget(entry.key for entry in some)
                for entry in some:
                    naive.kept.pop(entry.key, None)
            case 1 | 2:
                store.touch(entry.key for entry in some)
            case 3 | 4:
                assert finds(store, some) == [entry.key in naive.kept for entry in some]
            case 5:
                store.flush()
            case 6:
                chain = ROOT
            case _:
                ids = [rng.randrange(50), number, *range(rng.randrange(30))]
                make = rng.choice([kv_entry, state_entry])
                entry, below = make(chain, ids)
                chain = below if rng.random() < 0.7 else chain
                assert store.write(entry, payload(entry))
                naive.kept[entry.key] = entry
                known.append(entry)
        naive.check(store)


@pytest.mark.parametrize("seed", range(4))
def test_a_directory_does_what_a_dictionary_does(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    naive = NaiveStore()
    ceiling = rng.choice([30_000, 100_000, 1_000_000])
    for _ in range(6):
        store = open_store(tmp_path, FINGERPRINT, ceiling, files=Unsynced())
        naive.check(store)
        use_at_random(store, naive, rng, times=100)
        store.close()
        again = open_store(tmp_path, FINGERPRINT, ceiling, read_only=True)
        naive.check(again)
        assert sum(map(len, rebuild(again.entries(), FINGERPRINT))) == len(naive.kept)
        again.close()


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_stores_in_memory_do_what_a_dictionary_does(kind: str) -> None:
    for seed in range(3):
        store: EntryStore = MemoryStore(FINGERPRINT, 1 << 14)
        if kind == "host":
            store = HostStore(1 << 14, plain_memory, 1_800)
        use_at_random(store, NaiveStore(), random.Random(seed), times=600)
        assert store.counters().evicted > 20
        store.close()
