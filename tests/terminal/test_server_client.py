"""What the terminal commands say of a server that is none of ours."""

from __future__ import annotations

import httpx
import pytest

from pippin.terminal.server_client import ServerClient, ServerError, flush_cache, show_status


@pytest.mark.parametrize("body", ["<html>It works</html>", "", "[1]"])
def test_another_server_is_told_from_ours(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with ServerClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client._http, "_transport", transport)
        with pytest.raises(ServerError, match=r"127.0.0.1:9/status did not return a JSON object"):
            client.get("/status")


def test_an_answer_of_ours_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"state": "ready"}))
    with ServerClient("http://127.0.0.1:9/v1") as client:
        monkeypatch.setattr(client._http, "_transport", transport)
        assert client.get("/status") == {"state": "ready"}


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
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.path, request.headers.get("authorization")))
        return httpx.Response(200, json={"freed_bytes": 1, "kept_bytes": 0, "state": "ready"})

    for name in ("PIPPIN_API_KEY", "PIPPIN_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    transport = httpx.MockTransport(answer)
    monkeypatch.setattr(httpx.Client, "_init_transport", lambda *_, **__: transport)
    flush_cache("http://127.0.0.1:9")
    show_status("http://127.0.0.1:9")
    assert seen == [("/flush_cache", sent), ("/status", sent)]


def test_a_status_has_a_line_for_each_value_whatever_the_width(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"running": 1000, "cache": {"x" * 99: None, "paths": [{"tokens": 226}] * 9}}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=status))
    monkeypatch.setattr(httpx.Client, "_init_transport", lambda *_, **__: transport)
    monkeypatch.setenv("COLUMNS", "20")
    show_status("http://127.0.0.1:9")
    assert [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()] == [
        ["url", "http://127.0.0.1:9"],
        ["running", "1,000"],
        [f"cache.{'x' * 99}", "None"],
        ["cache.paths", str([{"tokens": 226}] * 9)],
    ]


def test_a_refusal_is_shown_in_the_servers_words(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"error": {"message": "this needs an admin key", "code": "admin_key_required"}}
    transport = httpx.MockTransport(lambda request: httpx.Response(403, json=refusal))
    monkeypatch.setattr(httpx.Client, "_init_transport", lambda *_, **__: transport)
    with pytest.raises(ServerError, match="this needs an admin key"):
        flush_cache("http://127.0.0.1:9")
