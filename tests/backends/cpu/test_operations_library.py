"""The library of operations is built once; without it mlx's own are used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.backends.mlx.cpu import build as builds
from pippin.backends.mlx.cpu import operations
from pippin.backends.mlx.cpu.build import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they are for Linux")


class Compiler:
    """Ends with these statuses, and says these errors."""

    def __init__(self, *ends: tuple[int, str]) -> None:
        self.left = list(ends)

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[command.index("-o") + 1]).touch()
        status, errors = self.left.pop(0)
        return subprocess.CompletedProcess(command, status, "", errors)


WORKS = (0, "")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds, "user_cache_path", lambda _: tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")


def test_a_library_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A checkout that was moved, or installed a second time, builds nothing, and needs no
    compiler; another source or fact is another library."""
    monkeypatch.setattr(subprocess, "run", Compiler(WORKS))
    first = build("x", [builds.SOURCES / "library.cpp"], ("-O3",), 1)
    assert first.exists()
    copy = shutil.copytree(builds.SOURCES, tmp_path / "cpp")
    monkeypatch.setattr(builds, "SOURCES", copy)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert build("x", [copy / "library.cpp"], ("-O3",), 1) == first
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", Compiler(WORKS, WORKS))
    assert build("x", [], ("-O3",), 2) != first
    (copy / "library.cpp").write_text("changed")
    assert build("x", [], ("-O3",), 1) != first


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ((-9, ""), "ended with -9"),
        ((1, "x.cpp:12:3: error: what went wrong\nterminated.\n"), "error: what went wrong"),
    ],
)
def test_what_failed_says_why_and_is_built_again(
    end: tuple[int, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", Compiler(end, WORKS))
    with pytest.raises(OSError, match=said):
        build("x", [], (), 1)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert build("x", [], (), 1).exists()


def test_a_compiler_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_late(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 1)

    monkeypatch.setattr(subprocess, "run", runs_late)
    with pytest.raises(OSError, match="stopped after 300 s"):
        build("x", [], (), 1)


@pytest.mark.parametrize(
    ("missing", "said"),
    [("g++", "no g++"), ("nanobind", "nanobind is not"), ("headers", "Python.h")],
)
def test_what_is_missing_is_named(
    missing: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if missing == "g++":
        monkeypatch.setattr(shutil, "which", lambda _: None)
    elif missing == "nanobind":
        monkeypatch.setitem(sys.modules, "nanobind", None)
    else:
        monkeypatch.setattr(operations.sysconfig, "get_path", lambda _: str(tmp_path))
    found = operations.find_operations.__wrapped__()
    assert found.module is None
    assert said in str(found.reason)
