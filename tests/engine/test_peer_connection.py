"""A connection of peers whose other end reads nothing, or is gone without a word."""

from __future__ import annotations

import asyncio
import gc
import socket
from threading import Event

from pippin.engine.peers.connection import Connection, WireThread


def test_a_thread_that_ends_releases_connections_that_wait_for_their_peers() -> None:
    """One that is left open is a ResourceWarning, and these fail tests."""
    thread, sent = WireThread("test-peers"), Event()

    async def send() -> None:
        connection = Connection(*await asyncio.open_connection(*address))
        connection._writer.write(bytes(64 << 20))  # more than sockets buffer
        sent.set()
        try:
            await asyncio.sleep(600)
        finally:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        thread.start(send())
        accepted, _ = server.accept()
        with accepted:
            assert sent.wait(10)
            thread.close()
            gc.collect()


def test_the_kernel_notices_an_end_that_is_gone() -> None:
    """Within seconds."""

    async def options() -> list[int]:
        connection = Connection(*await asyncio.open_connection(*address))
        connected = connection._writer.get_extra_info("socket")
        names = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)]
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            names.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        connection.close()
        return [connected.getsockopt(*name) for name in names]

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        is_probed, *milliseconds = asyncio.run(options())
    assert is_probed
    assert all(0 < each <= 10_000 for each in milliseconds)
