"""Damage of every kind costs hits: never a wrong byte, each counted once, and mended."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from disk_builders import (
    FINGERPRINT,
    ROOT,
    Unsynced,
    finds,
    finds_all,
    kv_entry,
    payload,
    state_entry,
)

from pippin.cache.disk.disk_store import DiskStore, open_store
from pippin.cache.disk.segment import HEADER, payload_digest
from pippin.cache.entries import Chain, Entry, divided
from pippin.types import Component

CEILING = 100_000
ENTRIES: list[Entry] = []
chain = ROOT
for n in range(8):
    kv, chain = kv_entry(chain, range(n, n + 30))
    ENTRIES += [kv, state_entry(chain, size=300)[0]]


def opened(directory: Path, fingerprint: bytes = FINGERPRINT) -> DiskStore:
    return open_store(directory, fingerprint, CEILING, files=Unsynced())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sound(tmp_path_factory.mktemp("sound"))


def make_sound(directory: Path) -> Path:
    """A directory of several segments that is in order."""
    store = opened(directory)
    for entry in ENTRIES:
        assert store.write(entry, payload(entry))
    store.close()
    (directory / "lock").unlink()
    assert len(files_of(directory)) == 2 * 4
    return directory


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def use(directory: Path) -> tuple[int, int]:
    """Read everything, write something; returns how many entries were lost, and damage counted."""
    store = opened(directory)
    entries = list(store.entries())
    num_there = sum(finds(store, entries))
    damaged = store.counters().damaged
    again, _ = state_entry(ROOT, [1234])
    assert store.write(again, payload(again))
    store.close()
    store = opened(directory)
    assert finds_all(store, [again])
    entries = list(store.entries())
    assert finds_all(store, entries)
    assert store.counters().damaged == 0, "the same damage was met again"
    store.close()
    return len(ENTRIES) - num_there, damaged


def flip_bits(sound: Path, tmp_path: Path, times: int) -> None:
    rng = random.Random(times)
    sizes = [path.stat().st_size for path in files_of(sound)]
    for _ in range(times):
        directory = tmp_path / "flipped"
        shutil.copytree(sound, directory)
        # Half of them in indexes and notes, which are small.
        weights = sizes if rng.random() < 0.5 else [1 if size < 4000 else 0 for size in sizes]
        path = rng.choices(files_of(directory), weights)[0]
        content = bytearray(path.read_bytes())
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        lost, damaged = use(directory)
        assert damaged == 1, f"byte {at} of {path.name}"
        if path.suffix == ".data" and at >= HEADER.size:
            assert lost == 1
        shutil.rmtree(directory)


@pytest.mark.slow
def test_a_flipped_bit_is_counted_once_and_costs_little(sound: Path, tmp_path: Path) -> None:
    flip_bits(sound, tmp_path, 60)


@pytest.mark.slow
def test_many_flipped_bits(sound: Path, tmp_path: Path) -> None:
    flip_bits(sound, tmp_path, 250)


@pytest.mark.slow
def test_a_file_that_is_cut_short_costs_what_was_behind(sound: Path, tmp_path: Path) -> None:
    rng = random.Random(4)
    for _ in range(40):
        directory = tmp_path / "cut"
        shutil.copytree(sound, directory)
        path = rng.choice(files_of(directory))
        size = rng.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.truncate(size)
        lost, damaged = use(directory)
        assert damaged <= 1, f"{path.name} of {size} bytes"
        if path.suffix == ".data":  # an index may end where a record does, as after a crash
            assert (damaged, lost > 0) == (1, True)
        shutil.rmtree(directory)


def segments(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.data"))


def swap(one: Path, other: Path) -> None:
    third = one.with_suffix(".third")
    one.rename(third)
    other.rename(one)
    third.rename(other)


def swap_data(directory: Path) -> None:
    swap(*segments(directory)[:2])


def swap_indexes(directory: Path) -> None:
    swap(*sorted(directory.rglob("*.index"))[:2])


def swap_data_and_index(directory: Path) -> None:
    path = segments(directory)[0]
    swap(path, path.with_suffix(".index"))


def swap_payloads(directory: Path) -> None:
    """Two payloads of one size change places inside of a file."""
    path = segments(directory)[0]
    content = bytearray(path.read_bytes())
    first, size = HEADER.size, ENTRIES[0].nbytes
    second = first + size + ENTRIES[1].nbytes
    one, other = content[first : first + size], content[second : second + size]
    assert ENTRIES[2].nbytes == size
    content[first : first + size], content[second : second + size] = other, one
    path.write_bytes(content)


def repeat_records(directory: Path) -> None:
    path = segments(directory)[0].with_suffix(".index")
    content = path.read_bytes()
    path.write_bytes(content + content[HEADER.size :])


def lose_data(directory: Path) -> None:
    segments(directory)[0].unlink()


def lose_index(directory: Path) -> None:
    segments(directory)[0].with_suffix(".index").unlink()


def empty_data(directory: Path) -> None:
    segments(directory)[0].write_bytes(b"")


def fill_with_zeros(directory: Path) -> None:
    path = segments(directory)[0]
    path.write_bytes(bytes(path.stat().st_size))


def rename_segment(directory: Path) -> None:
    path = segments(directory)[0]
    for each in (path, path.with_suffix(".index")):
        each.rename(each.with_stem("00000055"))


def copy_segment(directory: Path) -> None:
    path = segments(directory)[0]
    for each in (path, path.with_suffix(".index")):
        shutil.copy(each, each.with_stem("00000055"))


@pytest.mark.parametrize(
    ("damage", "counted", "costs"),
    [
        (swap_data, 2, True),
        (swap_indexes, 2, True),
        (swap_data_and_index, 1, True),
        (swap_payloads, 2, True),
        (repeat_records, 1, False),
        (lose_data, 1, True),
        (lose_index, 0, True),  # as where somebody was removing it
        (empty_data, 1, True),
        (fill_with_zeros, 1, True),
        (rename_segment, 0, False),
        (copy_segment, 0, False),
    ],
)
def test_files_that_were_exchanged_lost_or_overwritten(
    sound: Path, tmp_path: Path, damage: Callable[[Path], None], counted: int, costs: bool
) -> None:
    directory = tmp_path / "damaged"
    shutil.copytree(sound, directory)
    damage(directory)
    lost, damaged = use(directory)
    assert (damaged, lost > 0) == (counted, costs)


def test_another_models_segment_in_our_folder_is_left_alone(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "mixed"
    shutil.copytree(sound, directory)
    other = opened(directory, b"another")
    entry, _ = state_entry(Chain(b"another"), [5])
    assert other.write(entry, payload(entry))
    other.close()
    theirs = next(path for path in segments(directory) if path.parent.name != folder(sound).name)
    for each in (theirs, theirs.with_suffix(".index")):
        shutil.move(each, directory / folder(sound).name / f"00000077{each.suffix}")
    (directory / folder(sound).name / "notes.txt").write_text("somebody's")
    store = opened(directory)
    assert store.counters().foreign == 2
    assert store.counters().damaged == 0
    assert entry.key not in store
    assert len(store.entries()) == len(ENTRIES)
    store.close()
    assert (directory / folder(sound).name / "notes.txt").exists()
    assert (directory / folder(sound).name / "00000077.data").exists()


def folder(directory: Path) -> Path:
    return segments(directory)[0].parent


def test_damage_that_is_met_while_serving_is_not_met_again(sound: Path, tmp_path: Path) -> None:
    directory = tmp_path / "served"
    shutil.copytree(sound, directory)
    store = opened(directory)
    path = segments(directory)[0]
    content = bytearray(path.read_bytes())
    content[HEADER.size] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        assert finds(store, [ENTRIES[0], ENTRIES[1], ENTRIES[0]]) == [False, True, False]
    assert store.take_lost() == [ENTRIES[0].key]
    assert store.counters().damaged == 1
    assert store.write(ENTRIES[0], payload(ENTRIES[0]))
    assert finds_all(store, [ENTRIES[0]])
    store.close()
    assert use(directory) == (0, 0)


def test_a_digest_says_whose_bytes_and_how_they_are_laid_out() -> None:
    entry = ENTRIES[1]
    data = payload(entry)
    (array,) = entry.arrays
    others = [
        replace(entry, key=entry.key._replace(chain=bytes(32))),
        replace(entry, key=entry.key._replace(component=Component.HIDDEN)),
        replace(entry, arrays=(replace(array, dtype="int32"),)),
        replace(entry, arrays=(replace(array, shape=(10, 30)),)),
        replace(entry, arrays=(replace(array, name="2.state"),)),
    ]
    blocks = [block.digest() for block in divided(data)]
    digests = [payload_digest(b"a", each, blocks) for each in (entry, *others)]
    digests.append(payload_digest(b"b", entry, blocks))
    digests.append(payload_digest(b"a", entry, [*blocks, blocks[-1]]))
    assert len(set(digests)) == len(digests)
