"""A crash costs what was being written: every change of a file is tried as the last one."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crashes import RecordingDisk, Replay
from disk_builders import FINGERPRINT, ROOT, Unsynced, finds_all, kv_entry, payload, state_entry

from pippin.cache.disk.disk_store import open_store
from pippin.cache.entries import Key

CEILING = 8_000  # so low that segments make room all the time

VERBS = {"create", "write", "rename", "remove"}


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
                answered += [before] * (len(disk.changes) - len(answered))
                known.append(entry)
                store.write(entry, payload(entry))
                # What this write made room with may be gone at any of its changes.
                after = {each.key for each in store.entries()}
                answered += [before & after] * (len(disk.changes) - len(answered))
        there = {each.key for each in store.entries()}
        answered += [there] * (len(disk.changes) - len(answered))
    store.close()
    there = {each.key for each in store.entries()}
    return answered + [there] * (len(disk.changes) - len(answered))


def check_after_crash(directory: Path, expected: set[Key], *, torn: bool) -> None:
    """Nothing is wrong, nothing that was answered for is missing, and it can be used."""
    store = open_store(directory, FINGERPRINT, CEILING, files=Unsynced())
    sizes = [path.stat().st_size for path in directory.rglob("*.*")]
    sizes += [path.stat().st_size for path in directory.rglob("recency")]
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


def enumerate_crashes(tmp_path: Path, seed: int, num_operations: int) -> int:
    disk = RecordingDisk()
    source = tmp_path / f"source{seed}"
    answered = work(source, disk, seed, num_operations)
    assert {change.verb for change in disk.changes} == VERBS
    replay = Replay(source)
    rng = random.Random(seed)
    num_points = 0
    for change, expected in zip(disk.changes, answered, strict=True):
        points = []
        if change.verb == "write" and len(change.content) > 1:
            points.append((replay.torn(change, rng.randrange(1, len(change.content))), True))
        replay.apply(change)
        points.append((replay, False))
        for state, torn in points:
            crashed = tmp_path / "crashed"
            state.save(crashed)
            check_after_crash(crashed, expected, torn=torn)
            shutil.rmtree(crashed)
            num_points += 1
    return num_points


@pytest.mark.slow
def test_every_change_may_be_the_last_one(tmp_path: Path) -> None:
    assert enumerate_crashes(tmp_path, seed=2, num_operations=120) > 250


@pytest.mark.slow
def test_a_hundred_kills() -> None:
    kill_writers(100)


def kill_writers(times: int) -> None:
    """In a process of its own, which forks a writer for each kill."""
    script = Path(__file__).parent / "kill_writers.py"
    done = subprocess.run([sys.executable, script, str(times)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{times} kills, 0 wrong" in done.stdout
