"""Sends batches to subscribers, and sends past ones again. Knows no event.

    PUB      topic, sequence number (8 bytes, big-endian), batch
    ROUTER   a request is a sequence number; the answers are the batches from there on as PUB sent
             them, then one of sequence number -1 that is empty

Nothing here waits for a subscriber: what one does not read in time is dropped for that one.
"""

from __future__ import annotations

from collections import deque

import zmq

from pippin.errors import ConfigError

TOPIC = b"kv-events"
MAX_PAST = 10_000  # batches that can be sent again,
MAX_PAST_BYTES = 64 << 20  # of at most so many bytes
MAX_UNREAD = 10_000  # batches in the queue of a subscriber
MAX_REQUEST_BYTES = 1024  # of what others send
MAX_ANSWERS = 4  # replays in one turn
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class EventPublisher:
    """Used by one thread at a time."""

    def __init__(self, address: str, replay_address: str | None = None) -> None:
        """Raises ConfigError if one of them cannot be bound."""
        self._context = zmq.Context()
        self._next = 0
        self._past: deque[tuple[int, bytes]] = deque()
        self._past_bytes = 0
        try:
            self._pub = self._bind(zmq.PUB, "kv_events", address)
            self._router = None
            if replay_address is not None:
                self._router = self._bind(zmq.ROUTER, "kv_events_replay", replay_address)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, option: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNREAD + 1)  # a whole replay
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{option} is {address}, which cannot be used ({error}): use an address of this "
                "machine and a free port"
            ) from error
        return socket

    @property
    def addresses(self) -> list[str]:
        """As they were bound."""
        sockets = [socket for socket in (self._pub, self._router) if socket is not None]
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]

    @property
    def num_past(self) -> int:
        return len(self._past)

    def publish(self, batch: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._pub.send_multipart((TOPIC, _as_bytes(number), batch))
        self._past.append((number, batch))
        self._past_bytes += len(batch)
        while len(self._past) > MAX_PAST or self._past_bytes > MAX_PAST_BYTES:
            self._past_bytes -= len(self._past.popleft()[1])

    def answer(self) -> None:
        """Requests for past batches; what is no such request is dropped."""
        if self._router is None:
            return
        for _ in range(MAX_ANSWERS):
            if not self._router.poll(0):
                return
            frames = self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, batch in self._past:
                if number >= first:
                    answer = (client, b"", TOPIC, _as_bytes(number), batch)
                    self._router.send_multipart(answer)
            self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _as_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")
