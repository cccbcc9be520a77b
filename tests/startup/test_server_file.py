"""The file by which commands find a server: private, locked while it runs, and without keys."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest

from pippin.startup.server_file import announced, running_servers, runtime_directory
from processes import run_python


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "pippin"


def urls() -> list[str]:
    return [server.url for server in running_servers()]


def test_a_server_is_found_while_it_runs(runtime: Path) -> None:
    assert running_servers() == []
    with announced("http://127.0.0.1:1", "m"):
        (server,) = running_servers()
        assert (server.url, server.model) == ("http://127.0.0.1:1", "m")
    assert running_servers() == []
    assert not runtime.exists()


def test_other_processes_see_it_and_the_last_one_first(runtime: Path) -> None:
    code = (
        "from pippin.startup.server_file import announced, running_servers\n"
        "with announced('http://127.0.0.1:2', 'n'):\n"
        "    print([server.url for server in running_servers()])"
    )
    with announced("http://127.0.0.1:1", "m"):
        assert run_python(code) == "['http://127.0.0.1:2', 'http://127.0.0.1:1']"
        assert urls() == ["http://127.0.0.1:1"]


def test_the_file_of_a_killed_process_is_ignored_and_then_removed(runtime: Path) -> None:
    code = (
        "import os\n"
        "from pippin.startup.server_file import announced\n"
        "with announced('http://127.0.0.1:2', 'n'):\n"
        "    os._exit(0)"
    )
    run_python(code)
    (left,) = runtime.glob("*.json")
    assert running_servers() == []
    with announced("http://127.0.0.1:1", "m"):
        assert urls() == ["http://127.0.0.1:1"]
        assert not left.exists()


def test_a_process_number_that_was_used_again_does_not_revive_a_file(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    stale = {"url": "http://127.0.0.1:3", "model": "m", "pid": 1, "started_s": 0.0}
    (runtime / "1.json").write_text(json.dumps(stale))
    assert running_servers() == []


def test_only_its_user_can_read_it(runtime: Path) -> None:
    with announced("http://127.0.0.1:1", "m"):
        (file,) = runtime.iterdir()
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert set(json.loads(file.read_text())) == {
            "url",
            "model",
            "pid",
            "started_s",
            "checkpoints",
        }


@pytest.mark.parametrize("kind", ["open", "link", "file"])
def test_a_directory_that_others_could_write_to_is_not_used(
    kind: str, runtime: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    match kind:
        case "open":
            runtime.mkdir()
            runtime.chmod(0o770)
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            runtime.symlink_to(tmp_path / "elsewhere")
        case "file":
            runtime.touch()
    with caplog.at_level(logging.WARNING), announced("http://127.0.0.1:1", "m"):
        assert running_servers() == []
    assert "need --url http://127.0.0.1:1" in caplog.text


def test_without_a_runtime_directory_it_is_one_of_the_users_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert runtime_directory().parent == tmp_path
    with announced("http://127.0.0.1:1", "m"):
        assert urls() == ["http://127.0.0.1:1"]
