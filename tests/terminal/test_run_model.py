"""`pippin run`: on a server that serves the model, or on one that lives as long as the command."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.scripted_engine import TOKENIZER, ScriptedEngine, fail, say, serving
from bundled import BUNDLED_PATH
from cli.commands import error_of, output_of
from pippin.startup.server_file import announced, running_servers
from pippin.terminal.chat import find_model_server
from processes import environment_without_compiler, wait_until

NAME = BUNDLED_PATH.name


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PIPPIN_API_KEY", raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return tmp_path


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """Of a running server of the bundled model."""
    engine = ScriptedEngine(say("A fox."))
    with serving(engine) as url, announced(url, "stories", str(BUNDLED_PATH)):
        yield engine


def prompt_of(engine: ScriptedEngine) -> str:
    return TOKENIZER.decode_with_special(engine.submits[-1].token_ids)


def test_a_prompt_is_answered_by_a_running_server_of_the_model(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["run", NAME, "Tell me", "a story.", "--max-tokens", "7", "--system", "Be brief."]
    assert output_of(capsys, *argv) == "A fox.\n"
    assert "Tell me a story." in prompt_of(engine)
    assert "Be brief." in prompt_of(engine)
    assert engine.submits[-1].params.max_tokens == 7


def test_what_is_piped_precedes_the_prompt(
    engine: ScriptedEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Some\ntext.\n"))
    assert output_of(capsys, "run", NAME, "Summarize it.") == "A fox.\n"
    assert "Some\ntext.\n\nSummarize it." in prompt_of(engine)


def test_an_error_of_the_reply_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine(fail("the queue is full"))
    with serving(engine) as url, announced(url, "stories", str(BUNDLED_PATH)):
        assert error_of(capsys, "run", NAME, "Hi.") == (1, "pippin: the queue is full")


def test_nothing_to_ask_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = error_of(capsys, "run", NAME)
    assert status == 2
    assert "prompt is empty" in text


def test_a_server_is_found_by_each_name_of_its_model(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    with announced("http://127.0.0.1:1", "served-name", str(snapshot)):
        for name in ("served-name", "some/model", "model", str(snapshot)):
            found = find_model_server(name)
            assert found is not None, name
            assert found.url == "http://127.0.0.1:1"
        assert find_model_server("other/model") is None
        assert find_model_server(str(tmp_path)) is None


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pippin", "run", *argv],
        env=environment_without_compiler() | {"PIPPIN_BACKEND": "fake"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_without_a_server_one_is_started_and_stopped() -> None:
    with start(
        NAME, "Tell me a story.", "--max-tokens", "9", "--temperature", "0", "--max-len", "512"
    ) as process:
        said, errors = process.communicate()
    assert process.returncode == 0, errors
    assert said.strip()
    assert running_servers() == []


@pytest.mark.slow
def test_a_server_that_cannot_start_is_shown_with_its_reason() -> None:
    with start(NAME, "Hi.", "--cache-dir", "/dev/null/x", "--disk", "32MB") as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert "the server exited before its model was loaded:\npippin: " in errors
    assert "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_command_that_is_ended_ends_its_server(number: int) -> None:
    own, terminal = os.openpty()  # a person at a terminal, who types nothing
    with subprocess.Popen(
        [sys.executable, "-m", "pippin", "run", NAME],
        env=environment_without_compiler() | {"PIPPIN_BACKEND": "fake"},
        stdin=terminal,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(running_servers)
        if number == signal.SIGINT:  # drops a line; the end of input ends the conversation
            process.send_signal(number)
            os.write(own, b"\x04")
        else:
            process.send_signal(number)
        status = process.wait()
    os.close(own)
    os.close(terminal)
    assert status in (0, 128 + number)
    wait_until(lambda: not running_servers())
