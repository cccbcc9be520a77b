"""Which server a command talks to without --url, which one is sent a key, what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from cli.commands import error_of
from pippin.cli.commands import flush, status
from pippin.startup.server_file import announced
from pippin.terminal.server_client import (
    DEFAULT_URL,
    ServerClient,
    ServerError,
    connect,
)

Answer = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Requests, as URL and key; nothing answers unless `answer_with` says so."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("PIPPIN_API_KEY", "PIPPIN_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    answer_with(monkeypatch, refuse)
    return []


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused")


def answer_with(
    monkeypatch: pytest.MonkeyPatch,
    answer: Answer,
    seen: list[tuple[str, str | None]] | None = None,
) -> None:
    def note(request: httpx.Request) -> httpx.Response:
        if seen is not None:
            seen.append((str(request.url), request.headers.get("authorization")))
        return answer(request)

    transport = httpx.MockTransport(note)
    monkeypatch.setattr(httpx.Client, "_init_transport", lambda *_, **__: transport)


def ready(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"status": "ready"})


def test_a_server_at_the_default_port_is_found_and_sent_no_key(
    monkeypatch: pytest.MonkeyPatch,
    seen: list[tuple[str, str | None]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer_with(monkeypatch, ready, seen)
    with connect(None, "secret") as client:
        assert client.url == DEFAULT_URL
        client.get("/status")
    assert seen == [(f"{DEFAULT_URL}/ready", None), (f"{DEFAULT_URL}/status", None)]
    said = capsys.readouterr().err
    assert "no key is sent to http://127.0.0.1:8000" in said
    assert "secret" not in said


def test_a_server_that_this_user_started_is_sent_the_key(
    monkeypatch: pytest.MonkeyPatch, seen: list[tuple[str, str | None]]
) -> None:
    answer_with(monkeypatch, ready, seen)
    with announced(DEFAULT_URL, "m"), connect(None, "secret") as client:
        client.get("/status")
    assert seen == [(f"{DEFAULT_URL}/status", "Bearer secret")]


def test_a_server_at_another_port_is_found_by_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    with announced("http://127.0.0.1:4321", "m"), connect(None, None) as client:
        assert client.url == "http://127.0.0.1:4321"
    assert "using m at http://127.0.0.1:4321; --url chooses" in capsys.readouterr().err


def test_the_default_port_is_tried_before_files(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, ready)
    with announced("http://127.0.0.1:4321", "m"), connect(None, None) as client:
        assert client.url == DEFAULT_URL


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[1]),
        httpx.Response(404, json={"error": "no"}),
        httpx.Response(200, json={"status": "ok"}),
    ],
)
def test_another_program_at_the_default_port_is_no_server(
    monkeypatch: pytest.MonkeyPatch, response: httpx.Response
) -> None:
    answer_with(monkeypatch, lambda request: response)
    with announced("http://127.0.0.1:4321", "m"), connect(None, None) as client:
        assert client.url == "http://127.0.0.1:4321"


def test_a_server_that_still_loads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"error": {"code": "not_ready", "message": "the model is being loaded"}}
    answer_with(monkeypatch, lambda request: httpx.Response(503, json=body))
    with pytest.raises(ServerError, match=r"8000 is not ready: the model is being loaded"):
        connect(None, None)


@pytest.mark.parametrize("command", ["status", "cache flush", "chat"])
def test_without_a_server_a_command_says_how_to_start_one(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = error_of(capsys, *command.split())
    assert code == 1
    assert "no running server was found at http://127.0.0.1:8000" in text
    assert "start one with `pippin serve MODEL`, or name one with --url" in text
    assert ("`pippin chat MODEL`" in text) == (command == "chat")


def test_a_model_and_a_server_are_not_given_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = error_of(capsys, "chat", "some/model", "--url", "http://127.0.0.1:1")
    assert code == 2
    assert "--url names a server" in text


@pytest.mark.parametrize("body", ["<html>It works</html>", "", "[1]"])
def test_another_server_is_told_from_ours(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, lambda request: httpx.Response(200, text=body))
    with (
        ServerClient("http://127.0.0.1:9") as client,
        pytest.raises(ServerError, match=r"127.0.0.1:9/status did not return a JSON object"),
    ):
        client.get("/status")


@pytest.mark.parametrize(
    ("variables", "sent"),
    [
        ({}, None),
        ({"PIPPIN_API_KEY": "key other"}, "Bearer key"),
        ({"PIPPIN_API_KEY": "key", "PIPPIN_ADMIN_KEY": "root boss"}, "Bearer root"),
    ],
)
def test_a_server_is_asked_about_its_cache_with_the_admin_key(
    variables: dict[str, str],
    sent: str | None,
    monkeypatch: pytest.MonkeyPatch,
    seen: list[tuple[str, str | None]],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    body = {"freed_bytes": 1, "kept_bytes": 0, "state": "ready"}
    answer_with(monkeypatch, lambda request: httpx.Response(200, json=body), seen)
    flush(url="http://127.0.0.1:9")
    status(url="http://127.0.0.1:9")
    url = "http://127.0.0.1:9"
    assert seen == [(f"{url}/flush_cache", sent), (f"{url}/status", sent)]


def test_a_status_has_a_line_for_each_value_whatever_the_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"running": 1000, "cache": {"x" * 99: None, "paths": [{"tokens": 226}] * 9}}
    answer_with(monkeypatch, lambda request: httpx.Response(200, json=body))
    monkeypatch.setenv("COLUMNS", "20")
    status(url="http://127.0.0.1:9")
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["url", "http://127.0.0.1:9"],
        ["running", "1,000"],
        [f"cache.{'x' * 99}", "None"],
        ["cache.paths", str([{"tokens": 226}] * 9)],
    ]


def test_a_refusal_is_shown_in_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"error": {"message": "this needs an admin key", "code": "admin_key_required"}}
    answer_with(monkeypatch, lambda request: httpx.Response(403, json=refusal))
    with pytest.raises(ServerError, match="this needs an admin key"):
        flush(url="http://127.0.0.1:9")
