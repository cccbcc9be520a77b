"""Payloads block by block: every byte in one block, and any that is wrong in any of them shows."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from disk_builders import FINGERPRINT, ROOT, finds, kv_entry, payload, state_entry

from cases import cases
from pippin.cache import entries as blocks
from pippin.cache.disk.disk_store import open_store
from pippin.cache.disk.segment import HEADER, Segment, Slot
from pippin.cache.entries import Entry

MB = 1 << 20
BLOCK = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And many threads, however little there is to read."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(blocks, "ALONE_BYTES", 0)
    monkeypatch.setattr(blocks.os, "cpu_count", lambda: 8)


def large_entries() -> list[Entry]:
    """Of many blocks, one of two arrays, and one of less than a block."""
    kv, end = kv_entry(ROOT, range(31), width=3)
    return [kv, state_entry(end, size=500)[0], state_entry(end, [1], size=3)[0]]


@cases("sizes", [[], [0], [1], [64], [65], [128, 0, 1], [10, 20, 30, 40, 300]])
def test_blocks_are_the_bytes_of_all_arrays_in_order(sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    data = [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    found = blocks.divided(data)
    held = b"".join(bytes(part) for block in found for part in block.parts)
    assert held == b"".join(array.tobytes() for array in data)
    assert [block.at for block in found] == list(range(0, sum(sizes), BLOCK))
    assert all(block.nbytes == BLOCK for block in found[:-1])


def test_what_several_threads_read_is_what_was_written(tmp_path: Path) -> None:
    entries = large_entries()
    store = open_store(tmp_path, FINGERPRINT, MB)
    for entry in entries:
        assert store.write(entry, payload(entry))
    for _ in range(20):
        assert all(finds(store, entries))
    store.close()


def flip(at: int) -> Callable[[bytearray], None]:
    def damage(content: bytearray) -> None:
        content[HEADER.size + at] ^= 16

    return damage


def swap_blocks(content: bytearray) -> None:
    one, two = (slice(HEADER.size + n * BLOCK, HEADER.size + (n + 1) * BLOCK) for n in (1, 4))
    content[one], content[two] = content[two], content[one]


def cut(content: bytearray) -> None:
    del content[HEADER.size + 3 * BLOCK :]


@pytest.mark.parametrize("damage", [*(flip(n * BLOCK + 7) for n in range(5)), swap_blocks, cut])
def test_a_damaged_block_costs_its_entry_and_is_counted_once(
    tmp_path: Path, damage: Callable[[bytearray], None]
) -> None:
    second, first, _ = large_entries()
    store = open_store(tmp_path, FINGERPRINT, MB)
    for entry in (first, second):
        assert store.write(entry, payload(entry))
    (path,) = tmp_path.rglob("*.data")
    content = bytearray(path.read_bytes())
    damage(content)
    path.write_bytes(content)
    for _ in range(2):
        assert finds(store, [first, second]) == [False, damage is not cut]
    assert store.counters().damaged == 1 + (damage is cut)
    store.close()


def test_a_block_that_cannot_be_read_costs_its_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, _ = large_entries()
    store = open_store(tmp_path, FINGERPRINT, MB)
    for entry in (first, second):
        assert store.write(entry, payload(entry))
    read_block = Segment.read_block

    def failing(segment: Segment, slot: Slot, block: blocks.Block) -> bytes:
        if slot.entry == first and block.at == 2 * BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return read_block(segment, slot, block)

    monkeypatch.setattr(Segment, "read_block", failing)
    assert finds(store, [first, second]) == [False, True]
    assert store.counters().read_errors == 1
    assert store.counters().damaged == 0
    store.close()
