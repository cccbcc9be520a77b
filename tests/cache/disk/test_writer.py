"""The writer behind the engine: bounded, visible until written, and never in anybody's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from disk_builders import FINGERPRINT, ROOT, payload, state_entry

from pippin.cache.disk.entries import Bytes, Entry
from pippin.cache.disk.memory import MemoryStore
from pippin.cache.disk.writer import StoreWriter, Written

ENTRIES = [state_entry(ROOT, [number])[0] for number in range(6)]
SIZE = ENTRIES[0].nbytes


class HeldStore(MemoryStore):
    """A disk that takes its time: each write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(FINGERPRINT, 1 << 20)
        self.go = threading.Event()
        self.began = threading.Event()

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        self.began.set()
        assert self.go.wait(30)
        return super().write(entry, data)


@contextmanager
def writing(store: MemoryStore, rate: float = 1e12) -> Iterator[StoreWriter]:
    writer = StoreWriter(store, max_queued_bytes=3 * SIZE, bytes_per_second=rate)
    try:
        yield writer
    finally:
        if isinstance(store, HeldStore):
            store.go.set()
        writer.close()


def test_an_entry_is_visible_until_its_write_is_complete() -> None:
    store = HeldStore()
    with writing(store) as writer:
        entry = ENTRIES[0]
        assert writer.offer(entry, payload(entry))
        assert store.began.wait(30)
        assert entry.key not in store
        (found,) = writer.read([entry.key])
        assert found is not None
        assert writer.take_written() == []
        store.go.set()
        assert writer.drain(30)
        assert entry.key in store
        assert entry.key not in writer
        assert writer.take_written() == [Written(entry.key, kept=True)]


def test_a_full_queue_refuses_at_once() -> None:
    store = HeldStore()
    with writing(store) as writer:
        taken = [writer.offer(entry, payload(entry)) for entry in ENTRIES]
        assert taken == [True, True, True, False, False, False]
        assert writer.offer(ENTRIES[1], payload(ENTRIES[1]))  # it is there already
        assert writer.queued_bytes == 3 * SIZE
        assert writer.refused == 3
        store.go.set()
        assert writer.drain(30)
        assert writer.queued_bytes == 0
        assert [entry.key for entry in store.entries()] == [entry.key for entry in ENTRIES[:3]]


def test_queued_and_stored_are_read_together() -> None:
    store = HeldStore()
    store.go.set()
    first, second, missing = ENTRIES[:3]
    store.write(first, payload(first))
    store.go.clear()
    with writing(store) as writer:
        writer.offer(second, payload(second))
        keys = [second.key, missing.key, first.key]
        into = [[np.zeros(SIZE, np.uint8)] for _ in keys]
        for found in (writer.read(keys), writer.read(keys, into)):
            assert [each and each.entry for each in found] == [second, None, first]
        np.testing.assert_array_equal(into[0][0], payload(second)[0])
        np.testing.assert_array_equal(into[2][0], payload(first)[0])


def test_what_could_not_be_written_is_told() -> None:
    store = MemoryStore(FINGERPRINT, 1 << 20)
    store.fails = True
    with writing(store) as writer:
        writer.offer(ENTRIES[0], payload(ENTRIES[0]))
        assert writer.drain(30)
        assert writer.take_written() == [Written(ENTRIES[0].key, kept=False)]


def test_a_mistake_in_a_write_does_not_end_the_writer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
            if entry is ENTRIES[0]:
                raise RuntimeError("a mistake")
            return super().write(entry, data)

    store = Broken(FINGERPRINT, 1 << 20)
    with writing(store) as writer:
        for entry in ENTRIES[:2]:
            writer.offer(entry, payload(entry))
        assert writer.drain(30)
        assert [each.kept for each in writer.take_written()] == [False, True]
    assert "a mistake" in caplog.text


def test_the_rate_is_kept_between_writes_and_not_while_draining() -> None:
    store = MemoryStore(FINGERPRINT, 1 << 20)
    with writing(store, rate=SIZE / 3600) as writer:  # one entry an hour
        for entry in ENTRIES[:3]:
            writer.offer(entry, payload(entry))
        while not store.counters().written:
            time.sleep(0.001)
        time.sleep(0.05)
        assert store.counters().written == 1
        assert writer.drain(30)
        assert store.counters().written == 3


def test_closing_gives_up_what_cannot_be_written_in_time() -> None:
    store = HeldStore()
    writer = StoreWriter(store, max_queued_bytes=3 * SIZE, bytes_per_second=1e12)
    for entry in ENTRIES[:2]:
        writer.offer(entry, payload(entry))
    assert store.began.wait(30)
    threading.Timer(0.2, store.go.set).start()
    assert not writer.close(timeout_s=0.01)
    assert store.counters().written == 1  # the one that was under way
    assert not writer.offer(ENTRIES[2], payload(ENTRIES[2]))
