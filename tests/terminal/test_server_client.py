"""What the terminal commands say of a server that is none of ours."""

from __future__ import annotations

import httpx
import pytest

from pippin.terminal.server_client import ServerClient, ServerError


@pytest.mark.parametrize("body", ["<html>It works</html>", "", "[1]"])
def test_another_server_is_told_from_ours(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with ServerClient("http://127.0.0.1:9") as client:
        monkeypatch.setattr(client._http, "_transport", transport)
        with pytest.raises(ServerError, match=r"127.0.0.1:9/status answered, but not as Pippin"):
            client.get("/status")


def test_an_answer_of_ours_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json={"state": "ready"}))
    with ServerClient("http://127.0.0.1:9/v1") as client:
        monkeypatch.setattr(client._http, "_transport", transport)
        assert client.get("/status") == {"state": "ready"}
