"""`pippin cache show|verify|empty` on a directory: beside a server, and on a damaged one."""

from __future__ import annotations

from pathlib import Path

import pytest
from disk_builders import FINGERPRINT, ROOT, finds_all, kv_entry, payload, state_entry

from pippin.cache.disk.disk_store import DiskStore, open_store
from pippin.cache.disk.segment import HEADER
from pippin.cache.entries import Chain
from pippin.cli import main


def filled(directory: Path, fingerprint: bytes = FINGERPRINT) -> DiskStore:
    store = open_store(directory, fingerprint, 1 << 20)
    kv, end = kv_entry(Chain(fingerprint), range(50))
    for entry in (kv, state_entry(end)[0], state_entry(end, [5])[0]):
        assert store.write(entry, payload(entry))
    return store


def run(*arguments: str | Path) -> int:
    try:
        main(["cache", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_directory_is_shown_and_verified_while_a_server_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path, b"another model").close()
    store = filled(tmp_path)
    assert run("show", "--cache-dir", tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.count("attention") == shown.count("state") == 2
    assert f"{store.counters().bytes:,} bytes in all" in shown
    assert run("verify", "--cache-dir", tmp_path) == 0
    assert capsys.readouterr().out == "6 entries, 4,528 bytes read: 0 damaged, 0 unreadable\n"
    assert run("empty", "--cache-dir", tmp_path) == 1
    assert "is in use by process" in capsys.readouterr().err
    store.close()


def test_damage_is_told_and_nothing_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(tmp_path).close()
    (path,) = tmp_path.rglob("*.data")
    content = bytearray(path.read_bytes())
    content[HEADER.size + 7] ^= 4
    path.write_bytes(content)
    for _ in range(2):
        assert run("verify", "--cache-dir", tmp_path) == 1
        assert "1 damaged" in capsys.readouterr().out
    path.write_bytes(bytes(len(content)))
    assert run("verify", "--cache-dir", tmp_path) == 1
    assert path.read_bytes() == bytes(len(content))


def test_an_emptied_directory_holds_nothing_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, b"another model").close()
    filled(tmp_path).close()
    (tmp_path / "notes.txt").write_text("somebody's")
    monkeypatch.setenv("PIPPIN_CACHE_DIR", str(tmp_path))
    assert run("empty") == 0
    assert capsys.readouterr().out.startswith("freed ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["lock", "notes.txt"]
    assert run("show") == 0
    assert "has no prefix cache" in capsys.readouterr().out
    store = filled(tmp_path)
    kv, _ = kv_entry(ROOT, range(50))
    assert finds_all(store, [kv])
    store.close()


def test_what_is_no_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "verify", "empty"):
        assert run(command, "--cache-dir", tmp_path / "nowhere") == 1
        assert "nowhere is not a directory" in capsys.readouterr().err
