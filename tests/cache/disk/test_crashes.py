"""A crash costs what was being written: every change of a file is tried as the last one."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_builders import FINGERPRINT, ROOT, Unsynced, finds_all, kv_entry, payload, state_entry

from pippin.cache.disk.disk_store import open_store
from pippin.cache.entries import Bytes, Key

CEILING = 8_000  # so low that segments make room all the time


class RecordingDisk(Unsynced):
    """Copies its directory after every change of a file, and halfway through every write."""

    def __init__(self, directory: Path, copies: Path) -> None:
        self.states: list[tuple[Path, bool]] = []  # and whether a write was torn
        self.verbs: set[str] = set()
        self._directory = directory
        self._copies = copies

    def create(self, path: Path) -> int:
        file = super().create(path)
        self._keep("create")
        return file

    def write(self, file: int, at: int, parts: Sequence[Bytes | bytes]) -> None:
        content = b"".join(bytes(part) for part in parts)
        if len(content) > 1:
            super().write(file, at, [content[: len(content) // 2]])
            self._keep("write", torn=True)
        super().write(file, at, [content])
        self._keep("write")

    def truncate(self, file: int, size: int) -> None:
        super().truncate(file, size)
        self._keep("truncate")

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self._keep("rename")

    def remove(self, path: Path) -> None:
        if path.exists():
            super().remove(path)
            self._keep("remove")

    def _keep(self, verb: str, *, torn: bool = False) -> None:
        copy = self._copies / str(len(self.states))
        shutil.copytree(self._directory, copy)
        self.states.append((copy, torn))
        self.verbs.add(verb)


def work(directory: Path, disk: RecordingDisk, seed: int, num_operations: int) -> list[set[Key]]:
    """Random use of a store. For each change of a file: what had been answered for before it."""
    rng = random.Random(seed)
    clock = iter(range(10**9))
    store = open_store(directory, FINGERPRINT, CEILING, files=disk, clock=lambda: next(clock) * 7.0)
    answered: list[set[Key]] = []
    chain, known = ROOT, [kv_entry(ROOT, [1])[0]]
    for number in range(num_operations):
        match rng.randrange(10):
            case 0:
                store.forget([rng.choice(known).key])
            case 1:
                store.flush()
            case 2:
                store.touch(entry.key for entry in rng.sample(known, min(3, len(known))))
            case 3:
                chain = ROOT
            case 4:
                store.close()
                store = open_store(
                    directory, FINGERPRINT, CEILING, files=disk, clock=lambda: next(clock) * 7.0
                )
            case _:
                ids = [number, *(rng.randrange(9) for _ in range(rng.randrange(12)))]
                make = rng.choice([kv_entry, state_entry])
                entry, below = make(chain, ids)
                chain = below if make is kv_entry else chain
                before = {each.key for each in store.entries()}
                answered += [before] * (len(disk.states) - len(answered))
                known.append(entry)
                store.write(entry, payload(entry))
                # What this write made room with may be gone at any of its changes.
                after = {each.key for each in store.entries()}
                answered += [before & after] * (len(disk.states) - len(answered))
        there = {each.key for each in store.entries()}
        answered += [there] * (len(disk.states) - len(answered))
    store.close()
    there = {each.key for each in store.entries()}
    return answered + [there] * (len(disk.states) - len(answered))


def check_after_crash(directory: Path, expected: set[Key], *, torn: bool) -> None:
    """Nothing is wrong, nothing that was answered for is missing, and it can be used."""
    store = open_store(directory, FINGERPRINT, CEILING, files=Unsynced())
    sizes = [path.stat().st_size for path in directory.rglob("*.*")]
    assert store.counters().bytes == sum(sizes)  # nothing lies about that nobody counts
    entries = list(store.entries())
    assert finds_all(store, entries)
    assert expected <= {entry.key for entry in entries}
    assert store.counters().damaged <= torn  # half a record is noticed once
    again, _ = state_entry(ROOT, [77, 78])
    assert store.write(again, payload(again))
    store.close()
    store = open_store(directory, FINGERPRINT, CEILING, files=Unsynced())
    assert store.counters().damaged == 0  # mended
    assert finds_all(store, [again])
    store.close()


@pytest.mark.slow
def test_every_change_may_be_the_last_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    disk = RecordingDisk(source, tmp_path)
    answered = work(source, disk, seed=2, num_operations=120)
    assert disk.verbs >= {"create", "write", "remove"}
    assert len(disk.states) > 250
    for (crashed, torn), expected in zip(disk.states, answered, strict=True):
        check_after_crash(crashed, expected, torn=torn)
