"""A server's start: its port, and what it does between its model's load and its first request."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from pippin.config import ServerConfig
from pippin.errors import LoadError
from pippin.startup.launch import Entrance, listen


def refusal(**options: object) -> str:
    with pytest.raises(LoadError) as refused:
        listen(ServerConfig(**options))  # type: ignore[arg-type]
    return refused.value.message


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_in_use_suggests_one_that_is_free(host: str) -> None:
    with listen(ServerConfig(host=host, port=0)) as taken:
        port = taken.getsockname()[1]
        message = refusal(host=host, port=port)
        suggested = re.fullmatch(
            rf"cannot listen on {re.escape(host)}:{port}: Address already in use: stop the program "
            r"that uses this port, or use a free one: --port (\d+)",
            message,
        )
        assert suggested is not None
        with listen(ServerConfig(host=host, port=int(suggested[1]))) as free:
            assert free.getsockname()[1] == int(suggested[1]) != port


def test_ports_that_are_taken_too_are_not_suggested() -> None:
    with listen(ServerConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        first = int(refusal(port=port).split()[-1])
        with listen(ServerConfig(port=first)):
            assert int(refusal(port=port).split()[-1]) not in (port, first)


def test_no_port_is_suggested_where_none_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pippin.startup.launch.NEXT_PORTS", 0)
    with listen(ServerConfig(port=0)) as taken:
        message = refusal(port=taken.getsockname()[1])
    assert message.endswith("stop the program that uses this port")


def test_an_address_of_another_machine_suggests_those_of_this_one() -> None:
    assert "use --host 127.0.0.1" in refusal(host="192.0.2.1", port=0)  # TEST-NET-1: not ours


def test_a_privileged_port_suggests_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert refusal(port=80).endswith("ports below 1024 need root: use --port 8000, for example")


def test_no_collection_looks_at_what_was_made_before_the_first_request() -> None:
    app: Any = SimpleNamespace(resume_batches=lambda: None)

    async def load() -> Any:
        return app

    before = gc.get_freeze_count()
    try:
        asyncio.run(Entrance(ServerConfig()).open_with(load()))
        assert gc.get_freeze_count() > before
        assert app not in gc.get_objects()
    finally:
        gc.unfreeze()
