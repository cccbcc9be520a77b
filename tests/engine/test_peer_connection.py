"""A connection of peers whose other end reads nothing, when the thread of connections ends."""

from __future__ import annotations

import asyncio
import gc
import socket
from threading import Event

from pippin.engine.peers.connection import Connection
from pippin.engine.peers.wire_thread import WireThread


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
