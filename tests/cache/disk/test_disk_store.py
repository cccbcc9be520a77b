"""The store in a directory: what is written is found again, within its ceiling, by one writer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
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

from pippin.cache.disk.directory import Files
from pippin.cache.disk.disk_store import NOTE_S, PAUSE_S, DiskStore, open_store
from pippin.cache.entries import Bytes, Chain, Entry
from pippin.errors import DiskCacheError

MB = 1 << 20


def states(count: int, size: int = 1000) -> list[Entry]:
    return [state_entry(ROOT, [number], size)[0] for number in range(count)]


def write_all(store: DiskStore, entries: Sequence[Entry]) -> None:
    for entry in entries:
        assert store.write(entry, payload(entry))


def files_in(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in files_in(directory) if path.name != "lock")


def test_no_other_user_may_read_what_was_written(tmp_path: Path) -> None:
    """The index has the tokens of prompts in it."""
    store = open_store(tmp_path, FINGERPRINT, MB)
    write_all(store, states(3))
    store.close()
    written = [path for path in files_in(tmp_path) if path.suffix in (".data", ".index")]
    assert len(written) >= 2
    assert all(path.stat().st_mode & 0o077 == 0 for path in written)


def test_another_model_finds_nothing_and_makes_room_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, b"another model", 100_000)
    write_all(store, [state_entry(Chain(b"another model"), [n], 1000)[0] for n in range(15)])
    store.close()
    before = bytes_in(tmp_path)
    store = open_store(tmp_path, FINGERPRINT, 100_000)
    assert store.counters().entries == 0
    assert store.counters().foreign > 0
    assert store.counters().bytes == before
    write_all(store, states(20))
    assert store.counters().evicted == 0
    assert bytes_in(tmp_path) <= 100_000
    store.close()


def test_the_ceiling_holds_after_every_write_and_old_ones_go_first(tmp_path: Path) -> None:
    store = open_store(tmp_path, FINGERPRINT, 100_000, files=Unsynced())
    entries = states(100)
    for entry in entries:
        assert store.write(entry, payload(entry))
        assert bytes_in(tmp_path) == store.counters().bytes <= 100_000
    kept = {entry.key for entry in store.entries()}
    assert len(kept) > 18
    lost = store.take_lost()
    assert len(lost) == store.counters().evicted
    assert kept | set(lost) == {entry.key for entry in entries}
    assert kept.isdisjoint(lost)
    assert entries[0].key in lost
    assert entries[-1].key in kept
    store.close()


def test_what_is_used_stays_and_that_is_known_after_a_restart(tmp_path: Path) -> None:
    entries = states(100)
    favourite = entries[0]
    store = open_store(tmp_path, FINGERPRINT, 100_000, files=Unsynced())
    for number, entry in enumerate(entries):
        assert store.write(entry, payload(entry))
        store.touch([favourite.key])
        if number % 10 == 9:
            store.close()
            store = open_store(tmp_path, FINGERPRINT, 100_000, files=Unsynced())
    assert finds_all(store, [favourite])
    assert store.counters().entries < 25
    store.close()


@pytest.mark.parametrize("verb", ["flush", "write"])
def test_notes_of_use_are_saved_once_a_minute(tmp_path: Path, verb: str) -> None:
    """Of each segment, which are of one entry here."""
    now = [0.0]
    store = open_store(tmp_path, FINGERPRINT, 100_000, clock=lambda: now[0])
    first, second, third = states(3)
    write_all(store, [first, second])
    store.touch([first.key])
    now[0] = NOTE_S
    if verb == "write":
        store.write(third, payload(third))
    else:
        store.flush()
    os.close(store._directory_lock._file)  # as if the process had ended here
    again = open_store(tmp_path, FINGERPRINT, 100_000)
    entries = again.entries()
    assert entries.index(second) < entries.index(first)
    again.close()


def test_what_was_forgotten_is_gone_and_leaves_no_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path, FINGERPRINT, 160_000)
    entries = states(30)
    write_all(store, entries)
    store.forget(entry.key for entry in entries[:29])
    assert finds(store, [entries[0]]) == [False]
    store.flush()
    assert bytes_in(tmp_path) < 30_000
    assert store.take_lost() == []
    store.close()
    store = open_store(tmp_path, FINGERPRINT, 160_000)
    assert list(store.entries()) == [entries[29]]
    store.close()


def test_bytes_written_are_little_more_than_bytes_kept(tmp_path: Path) -> None:
    """Also where everything is replaced several times, and some of it is used all the time."""
    now = [0.0]
    store = open_store(tmp_path, FINGERPRINT, 4 * MB, files=Unsynced(), clock=lambda: now[0])
    popular: list[Entry] = []  # one of 200: they lie in segments of what nobody uses
    for number in range(1500):
        entry, _ = state_entry(ROOT, [7, number], 2500)  # 10 KB
        assert store.write(entry, payload(entry))
        if number % 200 == 0:
            popular.append(entry)
        store.touch(entry.key for entry in popular)
        now[0] += 1.0
        store.flush()
    store.close()
    counters = store.counters()
    assert counters.evicted > 1000
    assert counters.written_bytes <= 1.1 * counters.kept_bytes
    assert all(entry.key in store for entry in popular)


def test_an_entry_larger_than_the_ceiling_is_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, FINGERPRINT, 100_000)
    large, _ = state_entry(ROOT, [99], 30_000)
    write_all(store, states(3))
    assert not store.write(large, payload(large))
    assert store.counters().write_errors == 1
    assert store.counters().entries == 3
    store.close()


def test_who_follows_a_writer_waits_until_that_has_left(tmp_path: Path) -> None:
    first = open_store(tmp_path, FINGERPRINT, MB)
    leaves = threading.Timer(0.2, first.close)
    leaves.start()
    open_store(tmp_path, FINGERPRINT, MB, patience_s=60.0).close()
    leaves.join()


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    store = open_store(tmp_path, FINGERPRINT, MB)
    (entry,) = states(1)
    write_all(store, [entry])
    with pytest.raises(DiskCacheError, match=f"in use by process {os.getpid()}"):
        open_store(tmp_path, FINGERPRINT, MB)
    code = (
        "import sys; from pathlib import Path\n"
        "from pippin.cache.disk.disk_store import open_store\n"
        "open_store(Path(sys.argv[1]), b'x', 1 << 20)"
    )
    second = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    assert "in use by process" in second.stderr
    reader = open_store(tmp_path, FINGERPRINT, MB, read_only=True)
    assert finds_all(reader, [entry])
    assert not reader.write(*_another())
    reader.close()
    store.close()


def _another() -> tuple[Entry, list[Bytes]]:
    entry, _ = state_entry(ROOT, [99])
    return entry, payload(entry)


@pytest.mark.slow
def test_reads_writes_and_forgetting_beside_each_other(tmp_path: Path) -> None:
    """Readers never see a wrong byte nor a false damage while segments come and go."""
    store = open_store(tmp_path, FINGERPRINT, 200_000, files=Unsynced())
    entries = states(300)
    ends = threading.Event()
    wrong: list[Entry] = []

    def read() -> None:
        rng = np.random.default_rng(3)
        while not ends.wait(0.001):  # without a pause the writer waits for Python's lock alone
            some = [entries[i] for i in rng.integers(0, len(entries), 8)]
            try:
                finds(store, some)
            except AssertionError:
                wrong.extend(some)
            store.touch(entry.key for entry in some)
            store.forget([some[0].key])

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(3):
            write_all(store, entries)
    finally:
        ends.set()
        for reader in readers:
            reader.join()
    counters = store.counters()
    assert not wrong
    assert counters.hits > 0
    assert (counters.damaged, counters.read_errors, counters.write_errors) == (0, 0, 0)
    store.close()


class FullDisk(Files):
    """Takes `room` bytes, and then no more; a write that does not fit is done in part."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room = room
        self.code = code

    def write(self, file: int, at: int, parts: Sequence[Bytes | bytes]) -> None:
        whole = b"".join(bytes(part) for part in parts)
        size = os.fstat(file).st_size
        grows = max(0, at + len(whole) - size)
        if grows > self.room:
            super().write(file, at, [whole[: max(0, len(whole) - grows + self.room)]])
            self.room = 0
            raise OSError(self.code, os.strerror(self.code))
        self.room -= grows
        super().write(file, at, [whole])

    def truncate(self, file: int, size: int) -> None:
        self.room += max(0, os.fstat(file).st_size - size)
        super().truncate(file, size)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.room += path.stat().st_size
        super().remove(path)


def test_a_full_disk_gives_up_old_segments_and_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, FINGERPRINT, MB, files=FullDisk(150_000))
    entries = states(200)
    write_all(store, entries)
    assert store.counters().evicted > 100
    assert finds_all(store, [entries[-1]])
    store.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_costs_that_entry_alone(tmp_path: Path, code: int) -> None:
    now = [0.0]
    entries = states(6)
    disk = FullDisk(10_000, code)
    store = open_store(tmp_path, FINGERPRINT, MB, files=disk, clock=lambda: now[0])
    outcomes = [store.write(entry, payload(entry)) for entry in entries[:4]]
    if code != errno.ENOSPC:
        assert outcomes == [True, True, False, False]  # one failed, one met the pause
        assert store.counters().write_errors == 2
    disk.room = 1 << 30
    now[0] += PAUSE_S
    write_all(store, entries[4:])
    written = [entry for entry in entries if entry.key in store]
    store.close()
    store = open_store(tmp_path, FINGERPRINT, MB)
    assert set(store.entries()) == set(written)
    assert finds_all(store, written)
    assert store.counters().damaged == 0
    store.close()


def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path, FINGERPRINT, MB)
    first, second = states(2)
    write_all(store, [first, second])
    with monkeypatch.context() as patch:

        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr("pippin.cache.disk.segment.read_into", fail)
        assert finds(store, [first]) == [False]
    assert store.take_lost() == [first.key]
    assert store.counters().read_errors == 1
    assert finds_all(store, [second])
    store.close()


def test_without_preadv_the_same_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    store = open_store(tmp_path, FINGERPRINT, MB)
    kv, _ = kv_entry(ROOT, range(50))
    write_all(store, [kv])
    assert finds_all(store, [kv])
    store.close()


def test_what_cannot_be_a_directory_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(DiskCacheError, match="file cannot be a cache directory"):
        open_store(file, FINGERPRINT, MB)


def test_a_disk_without_room_for_the_process_id_is_written_when_it_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pippin.cache.disk.directory.os.pwrite", full)
        store = open_store(tmp_path, FINGERPRINT, MB)
    assert not store.read_only
    assert "the process id cannot be written" in caplog.text
    with pytest.raises(DiskCacheError, match=r"in use by process \?"):
        open_store(tmp_path, FINGERPRINT, MB)
    (entry,) = states(1)
    write_all(store, [entry])
    assert finds_all(store, [entry])
    store.close()


def test_where_no_lock_can_be_had_what_is_there_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path, FINGERPRINT, MB)
    (entry,) = states(1)
    write_all(store, [entry])
    store.close()
    before = {path: path.read_bytes() for path in files_in(tmp_path)}

    def refuse(directory: Path, patience_s: float) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("pippin.cache.disk.disk_store.DirectoryLock", refuse)
    store = open_store(tmp_path, FINGERPRINT, MB)
    assert store.read_only
    assert finds_all(store, [entry])
    assert not store.write(*_another())
    store.forget([entry.key])
    store.close()
    assert "is only read" in caplog.text
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == before


def kept(directory: Path) -> tuple[Path, Entry]:
    """The only segment of a store, and the entry in it."""
    store = open_store(directory, FINGERPRINT, MB)
    (entry,) = states(1)
    write_all(store, [entry])
    store.close()
    return next(directory.rglob("*.data")), entry


@pytest.mark.parametrize("name", ["lock", "00000001.data", "00000001.index"])
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_is_no_regular_file_is_neither_read_nor_written(
    tmp_path: Path, name: str, kind: str
) -> None:
    """And the start does not wait for it."""
    victim, directory = tmp_path / "victim", tmp_path / "cache"
    segment, entry = kept(directory)
    path = directory / "lock" if name == "lock" else segment.with_name(name)
    victim.write_bytes(path.read_bytes() + b"more")
    before = victim.read_bytes()
    path.unlink()
    path.symlink_to(victim) if kind == "link" else os.mkfifo(path)
    if name == "lock":
        with pytest.raises(DiskCacheError, match="lock is not a regular file: remove it"):
            open_store(directory, FINGERPRINT, MB)
    else:
        store = open_store(directory, FINGERPRINT, MB)
        assert finds(store, [entry]) == [False]
        assert store.counters().read_errors == 1
        store.close()
    assert victim.read_bytes() == before


def test_files_larger_than_any_of_ours_are_not_read(tmp_path: Path) -> None:
    segment, entry = kept(tmp_path)
    os.truncate(segment.with_suffix(".index"), 1 << 40)
    store = open_store(tmp_path, FINGERPRINT, 1 << 41)
    assert finds(store, [entry]) == [False]
    store.close()
    store = open_store(tmp_path, FINGERPRINT, MB)
    store.close()
    assert not segment.exists(), "it is larger than the ceiling"


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("part", ["directory", "folder"])
def test_a_directory_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, mode: int
) -> None:
    monkeypatch.setattr(os, "getegid", lambda: 20)  # a group of several users
    segment, entry = kept(tmp_path)
    shared = tmp_path if part == "directory" else segment.parent
    shared.chmod(mode)
    with pytest.raises(DiskCacheError, match=f"{shared} .*mode {mode:o}.*chmod -R go-w {shared}"):
        open_store(tmp_path, FINGERPRINT, MB)
    shared.chmod(0o755)
    store = open_store(tmp_path, FINGERPRINT, MB)
    assert finds_all(store, [entry])
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_group_that_is_the_users_own_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Kubernetes volume with an fsGroup is: of root, its group the container's."""
    os.chown(tmp_path, -1, 4321)
    tmp_path.chmod(0o2775)
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "getegid", lambda: 4321)
    open_store(tmp_path, FINGERPRINT, MB).close()


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() == 0:
        os.chown(tmp_path, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(DiskCacheError, match="belongs to user"):
        open_store(tmp_path, FINGERPRINT, MB)


def test_a_models_folder_is_no_link(tmp_path: Path) -> None:
    segment, _ = kept(tmp_path / "cache")
    segment.parent.rename(tmp_path / "elsewhere")
    segment.parent.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskCacheError, match="is not a directory: remove it"):
        open_store(tmp_path / "cache", FINGERPRINT, MB)


def test_a_directory_that_we_make_is_ours_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        segment, _ = kept(tmp_path / "cache")
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "cache", segment.parent)} == {0o700}
