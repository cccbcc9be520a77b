"""Memory that two engines map: what is written is what is read, and nothing else is mapped."""

from __future__ import annotations

import os
import random
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from cases import cases
from pippin.engine.peers import connection
from pippin.engine.peers.connection import IncomingMemory, OutgoingMemory


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(connection, "FOLDERS", (str(tmp_path / "none"), str(tmp_path)))
    return tmp_path


def both(nbytes: int) -> tuple[OutgoingMemory, IncomingMemory]:
    sender = OutgoingMemory(nbytes)
    return sender, IncomingMemory(sender.name, nbytes, sender.token)


@cases("seed", range(20))
def test_payloads_of_any_size_arrive_whole_whenever_they_are_taken(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((64, 100, 1000))
    sender, receiver = both(size)
    on_their_way: deque[tuple[int, list[np.ndarray]]] = deque()

    def take() -> None:
        at, sent = on_their_way.popleft()
        arrived = [np.empty_like(part) for part in sent]
        assert receiver.read(at, arrived)
        for part, copy in zip(sent, arrived, strict=True):
            np.testing.assert_array_equal(part, copy)
        assert sender.free(at + sum(part.nbytes for part in sent))

    for number in range(300):
        lengths = [rng.randint(1, size // 2), rng.randint(0, size // 2)] if number % 7 else [size]
        payload = [np.full(length, number % 251, np.uint8) for length in lengths]
        while (at := sender.place(sum(lengths))) is None:
            take()  # if nothing is left to take, there must have been room
        sender.write(at, payload)
        on_their_way.append((at, payload))
        while on_their_way and rng.random() < 0.4:
            take()


def test_what_cannot_have_been_taken_is_refused() -> None:
    sender, _ = both(64)
    assert sender.place(40) == 0
    assert not sender.free(41)
    assert sender.free(40)
    assert not sender.free(39)


def test_no_payload_lies_beyond_the_end() -> None:
    _, receiver = both(64)
    assert not receiver.read(30, [np.empty(40, np.uint8)])
    assert not receiver.read(0, [np.empty(65, np.uint8)])


def test_the_file_is_private_and_its_name_is_gone_afterwards(folder: Path) -> None:
    sender, _ = both(4096)
    assert (folder / sender.name).stat().st_mode & 0o777 == 0o600
    sender.remove_name()
    sender.remove_name()
    assert not list(folder.iterdir())


def test_the_file_of_an_engine_that_was_killed_is_removed_by_the_next_one(folder: Path) -> None:
    killed, other, (live, _) = OutgoingMemory(64), folder / "pippin-tests-0", both(64)
    other.touch()
    for path in (folder / killed.name, other):
        os.utime(path, (0, 0))
    later = OutgoingMemory(64)
    assert {path.name for path in folder.iterdir()} == {live.name, later.name, other.name}


def test_a_full_file_system_is_an_error_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, nbytes: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(connection, "_map", fail)
    with pytest.raises(OSError, match="No space left"):
        OutgoingMemory(4096)
    assert not list(folder.iterdir())


def test_only_the_senders_own_file_is_mapped(folder: Path) -> None:
    sender = OutgoingMemory(4096)
    (folder / "secret").write_bytes(b"\0" * 4096)
    linked = "pippin-" + "0" * 32
    os.symlink(folder / sender.name, folder / linked)
    for name, nbytes, token in [
        ("secret", 4096, b"\0" * 32),
        ("../secret", 4096, b"\0" * 32),
        (linked, 4096, sender.token),
        ("pippin-" + "1" * 32, 4096, sender.token),
        (sender.name, 8192, sender.token),
        (sender.name, 1 << 40, sender.token),
        (sender.name, 0, sender.token),
        (sender.name, 4096, b"\0" * 32),
    ]:
        with pytest.raises(OSError, match=r"pippin-|secret"):
            IncomingMemory(name, nbytes, token)


def test_a_file_of_another_user_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = OutgoingMemory(4096)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(OSError, match="of this user"):
        IncomingMemory(sender.name, 4096, sender.token)
