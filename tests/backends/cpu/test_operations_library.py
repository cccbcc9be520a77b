"""The library of operations is built and tried once; without it mlx's own are used."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pippin.backends.mlx.cpu.operations import library
from pippin.backends.mlx.cpu.operations.check import DOES_NOT_FIT

needs_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="built with g++, on Linux"
)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's cache directory with nothing in it, and nothing remembered of another one."""
    monkeypatch.setattr(library, "user_cache_path", lambda _: tmp_path)
    monkeypatch.delenv("PIPPIN_OPERATIONS", raising=False)
    library.find_library.cache_clear()
    yield
    library.find_library.cache_clear()


class Commands:
    """Stands for the compiler and for the process that tries what it built."""

    def __init__(self, *exits: int) -> None:
        self.left = list(exits)
        self.ran: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.ran.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, self.left.pop(0), "", "what went wrong\n")


@needs_compiler
def test_it_is_built_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(0, 0)
    monkeypatch.setattr(subprocess, "run", commands)
    first = library.find_library()
    library.find_library.cache_clear()  # another process
    assert library.find_library() == first
    assert first.path is not None
    assert first.path.exists()
    assert ["-m" in command for command in commands.ran] == [False, True]


@needs_compiler
@pytest.mark.parametrize("exits", [(1,), (0, DOES_NOT_FIT), (0, -11)])
def test_what_does_not_work_is_not_tried_again(
    exits: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    commands = Commands(*exits)
    monkeypatch.setattr(subprocess, "run", commands)
    with caplog.at_level(logging.WARNING):
        assert library.find_library().path is None
    assert "what went wrong" in caplog.text
    library.find_library.cache_clear()
    again = library.find_library()
    assert again.path is None
    assert "what went wrong" in str(again.reason)
    assert not list(tmp_path.rglob("*.so*"))


@needs_compiler
def test_what_could_not_be_tried_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Commands(0, 1))  # a traceback: a package is missing
    assert "what went wrong" in str(library.find_library().reason)
    library.find_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", Commands(0, 0))
    assert library.find_library().path is not None


@needs_compiler
def test_a_compiler_that_takes_too_long_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_late(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", runs_late)
    assert library.find_library().path is None
    library.find_library.cache_clear()
    monkeypatch.setattr(subprocess, "run", Commands(0, 0))
    assert library.find_library().path is not None


def test_they_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPPIN_OPERATIONS", "off")
    assert library.find_library() == library.OperationsReport(reason="PIPPIN_OPERATIONS=off")


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert library.find_library().path is None
