"""The library of operations is built and tried once; without it mlx's own are used."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pippin.backends.mlx.cpu.operations import library
from pippin.backends.mlx.cpu.operations.library import DOES_NOT_FIT

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="built with g++, on Linux"
)


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's cache directory with nothing in it, and nothing remembered of another one."""
    monkeypatch.setattr(library, "user_cache_path", lambda _: tmp_path)
    library.find_library.cache_clear()
    yield
    library.find_library.cache_clear()


@dataclass
class Ends:
    """How a command ends, and what it says."""

    status: int = 0
    printed: str = ""
    errors: str = ""


WORKS = Ends()


class Commands:
    """Stands for the compiler and for the process that tries what it built."""

    def __init__(self, *ends: Ends, version: str = "g++ 12") -> None:
        self.left = list(ends)
        self.version = version
        self.ran: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if "--version" in command:
            return subprocess.CompletedProcess(command, 0, self.version, "")
        self.ran.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).touch()
        end = self.left.pop(0)
        return subprocess.CompletedProcess(command, end.status, end.printed, end.errors)


def find_again() -> library.OperationsReport:
    """As another process does."""
    library.find_library.cache_clear()
    return library.find_library()


def test_it_is_built_and_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Commands(WORKS, WORKS)
    monkeypatch.setattr(subprocess, "run", commands)
    first = library.find_library()
    assert find_again() == first
    assert first.path is not None
    assert first.path.exists()
    assert ["-m" in command for command in commands.ran] == [False, True]


def test_a_copy_of_the_source_is_the_same_library_and_a_changed_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A checkout that was moved, or installed a second time, builds nothing."""
    commands = Commands(WORKS, WORKS, WORKS, WORKS)
    monkeypatch.setattr(subprocess, "run", commands)
    first = library.find_library()
    copy = shutil.copytree(library.SOURCE.parent, tmp_path / "cpp") / library.SOURCE.name
    monkeypatch.setattr(library, "SOURCE", copy)
    assert find_again() == first
    assert len(commands.ran) == 2
    copy.write_text(copy.read_text() + "\n")
    assert find_again().path != first.path


@pytest.mark.parametrize(
    "ends",
    [
        (WORKS, Ends(DOES_NOT_FIT, errors="what went wrong\n")),
        (WORKS, Ends(-signal.SIGSEGV, errors="what went wrong\n")),  # before any was tried
    ],
)
def test_what_does_not_work_is_not_tried_again(
    ends: tuple[Ends, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(subprocess, "run", Commands(*ends))
    first = library.find_library()
    assert first.path is None
    assert "what went wrong" in str(first.reason)
    again = find_again()
    assert again.path is None
    assert "what went wrong" in str(again.reason)
    assert not list(tmp_path.rglob("*.so*"))


@pytest.mark.parametrize(
    "ends",
    [
        (Ends(-signal.SIGKILL),),
        (Ends(1, errors="library.cpp:12:3: error: what went wrong\ncompilation terminated.\n"),),
        (WORKS, Ends(1, errors="ModuleNotFoundError: what went wrong\n")),  # a traceback
        (WORKS, Ends(-signal.SIGKILL, printed="try rms_norm\n")),
        (WORKS, Ends(-signal.SIGTERM, printed="try rms_norm\n")),
    ],
)
def test_what_may_be_the_machine_s_fault_is_tried_again(
    ends: tuple[Ends, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", Commands(*ends))
    assert library.find_library().path is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, WORKS))
    assert find_again().path is not None


def test_a_compiler_that_takes_too_long_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_late(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    with monkeypatch.context() as patch:  # and where there is none, nothing is built
        patch.setattr(shutil, "which", lambda _: None)
        assert library.find_library().path is None
    monkeypatch.setattr(subprocess, "run", runs_late)
    assert find_again().path is None
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, WORKS))
    assert find_again().path is not None


def test_a_refusal_counts_for_its_compiler_and_its_mlx(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    libmlx = tmp_path / "mlx" / "lib" / "libmlx.so"
    libmlx.parent.mkdir(parents=True)
    libmlx.write_bytes(b"one build")
    monkeypatch.setattr(library, "libmlx_path", lambda: libmlx)
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, Ends(DOES_NOT_FIT)))
    assert find_again().path is None
    assert find_again().path is None
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, WORKS, version="g++ 13"))
    assert find_again().path is not None
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, WORKS))
    libmlx.write_bytes(b"another build of the same version")
    assert find_again().path is not None


def test_an_operation_that_does_not_work_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One crashes, which ends the process that tried it; one computes something else."""
    commands = Commands(
        WORKS,
        Ends(-signal.SIGILL, printed="try rms_norm\nok rms_norm\ntry linear\n"),
        Ends(printed="try rms_norm\nok rms_norm\ntry choose\noff choose: its error is 2e+00\n"),
    )
    monkeypatch.setattr(subprocess, "run", commands)
    expected = {"linear": "it crashed (SIGILL)", "choose": "its error is 2e+00"}
    assert find_again().left_out == expected
    assert commands.ran[-1][-1] == "linear"  # is not tried again
    again = find_again()
    assert again.left_out == expected
    assert again.path is not None


def test_a_library_whose_trials_are_not_known_is_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", Commands(WORKS, WORKS))
    find_again()
    (notes,) = tmp_path.rglob("*.json")
    for damaged in ("[1", None):
        notes.write_text(damaged) if damaged else notes.unlink()
        commands = Commands(WORKS, WORKS)
        monkeypatch.setattr(subprocess, "run", commands)
        assert find_again().path is not None
        assert not commands.left
