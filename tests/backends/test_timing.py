"""Remembered times: kept per machine, replaced whole, and never a reason not to start."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from pippin.backends.mlx.timing import RememberedTimes, times_file


def remember(path: Path, machine: str, kind: str, times: dict[str, float]) -> None:
    remembered = RememberedTimes(path, machine)
    remembered.add(kind, times)
    remembered.save()


def test_times_are_found_again_on_the_same_machine_only(tmp_path: Path) -> None:
    path = tmp_path / "new" / "times.json"
    remember(path, "M1", "decode", {"kernel": 2.0, "joined": 1.0})
    remember(path, "M1", "prefill", {"kernel": 4.0, "joined": 3.0})
    remember(path, "M2", "decode", {"kernel": 6.0, "joined": 5.0})
    assert RememberedTimes(path, "M1").get("decode") == {"kernel": 2.0, "joined": 1.0}
    assert RememberedTimes(path, "M1").get("prefill") == {"kernel": 4.0, "joined": 3.0}
    assert RememberedTimes(path, "M2").get("decode") == {"kernel": 6.0, "joined": 5.0}
    assert RememberedTimes(path, "M2").get("prefill") is None
    assert [entry.name for entry in path.parent.iterdir()] == ["times.json"]


def test_without_new_times_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    RememberedTimes(path, "M1").save()
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"M1": {"decode": 1}}',
        b'{"M1": {"decode": {"a": ""}}}',
    ],
)
def test_a_damaged_file_is_said_once_and_rebuilt(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "times.json"
    path.write_bytes(content)
    remembered = RememberedTimes(path, "M1")
    assert remembered.get("decode") is None
    remembered.add("decode", {"kernel": 2.0, "joined": 1.0})
    remembered.save()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text
    assert RememberedTimes(path, "M1").get("decode") == {"kernel": 2.0, "joined": 1.0}


def test_a_directory_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "times.json"
    remembered = RememberedTimes(path, "M1")
    assert remembered.get("decode") is None
    remembered.add("decode", {"kernel": 2.0, "joined": 1.0})
    remembered.save()
    assert len(caplog.records) == 1
    assert "timed again at the next load" in caplog.text


def test_the_file_lies_in_the_user_s_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert times_file("attention") == Path("/caches/pippin/attention.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    assert times_file("attention") == Path("/home/someone", caches, "pippin/attention.json")
