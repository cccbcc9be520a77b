"""The server's end of the channel to one engine process, which has bound both sockets.

Knows no request: it carries messages.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from pippin.errors import EngineDead
from pippin.messages import FromEngine, ToEngine

LINGER_MS = 200


class Connection:
    def __init__(
        self, inbox: str, outbox: str, is_running: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_running`: whether there is a process that reads the inbox."""
        self._is_running = is_running
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._push: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._pull = zmq.asyncio.Context.instance().socket(zmq.PULL)
        for socket in (self._push, self._pull):
            socket.set_hwm(0)  # sending never blocks, so it can be a plain call
            socket.linger = LINGER_MS
        self._push.connect(inbox)
        self._pull.connect(outbox)

    @property
    def alive(self) -> bool:
        return self._is_running()

    def send(self, message: ToEngine) -> None:
        self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def receive(self) -> FromEngine:
        frame = await self._pull.recv()
        try:
            return self._decoder.decode(frame)
        except msgspec.DecodeError as error:
            raise EngineDead(
                f"the engine sent a message that cannot be decoded: {error}"
            ) from error

    def close(self) -> None:
        self._push.close()
        self._pull.close()
