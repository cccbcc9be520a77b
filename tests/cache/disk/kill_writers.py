"""Kills a process that writes to a store, at random moments: python kill_writers.py [times]

After each kill what the writer had answered for last must be there, and every byte that is found
must be right. The writers go on in one directory, whose ceiling they reach.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from disk_builders import FINGERPRINT, ROOT, finds_all, payload, state_entry

from pippin.cache.disk.disk_store import open_store
from pippin.cache.entries import Entry

CEILING = 2_000_000


def entry_of(number: int) -> Entry:
    return state_entry(ROOT, [number], size=1000 + number % 7 * 1000)[0]


def write_until_killed(directory: Path, number: int, told: int) -> None:
    """Says the number of each entry that was answered for."""
    store = open_store(directory, FINGERPRINT, CEILING)
    os.write(told, b"open\n")
    while True:
        entry = entry_of(number)
        assert store.write(entry, payload(entry))
        os.write(told, f"{number}\n".encode())
        number += 1
        if number % 5 == 0:
            store.touch([entry_of(number - 5).key])
            store.forget([entry_of(number - 3).key])
            store.flush()


def kill_one(directory: Path, number: int, rng: random.Random) -> list[int]:
    """Numbers that a writer answered for before it was killed."""
    heard, told = os.pipe()
    writer = os.fork()
    if writer == 0:
        try:
            write_until_killed(directory, number, told)
        finally:
            os._exit(1)
    os.close(told)
    with os.fdopen(heard, "rb") as lines:
        assert lines.readline() == b"open\n"
        time.sleep(rng.random() * 0.02)
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the writer failed by itself"
        return [int(line) for line in lines.read().split()]


def main(times: int) -> None:
    rng = random.Random(times)
    number = answered = damaged = 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            said = kill_one(Path(folder), number, rng)
            store = open_store(Path(folder), FINGERPRINT, CEILING)
            for entry in store.entries():
                assert finds_all(store, [entry])
            if said:
                assert entry_of(said[-1]).key in store
                number = said[-1] + 1
            answered += len(said)
            damaged += store.counters().damaged
            store.close()
            number += 1  # the one that was under way may be there or not
    print(f"{times} kills, 0 wrong, {answered} entries answered for, {damaged} torn records")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
