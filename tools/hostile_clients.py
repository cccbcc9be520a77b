"""Measures what hostile clients cost the others: gaps in a stream, and the server's memory.

    python tools/hostile_clients.py [--seconds 5] [--only NAME]

The server has two keys: one streams a reply, and hostile clients have the other, or none. Before
every attack the same stream is measured alone. An attack runs in a process of its own:

    chunks      8 connections send bodies in one-byte chunks
    bodies      50 bodies of 28 MB are sent but for their end
    grammars    4 requests have grammars of 30 to 120 rules that split one text in every way
    integers    3 bodies of 28 MB are integers of 4,000 digits
    heads       1,024 heads are sent by half; then /health is asked

A gap above 100 ms or a growth above 300 MB is a fault. On a machine that has other work a gap is
long without the server's doing: `busy` is how long its HTTP thread computed between two events.
Linux: reads /proc.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPConnection
from itertools import repeat
from multiprocessing import Process
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from fuzz_bodies import Server, cpu_s, rss_mb, serving  # noqa: E402

LONGEST_GAP_S = 0.1
MOST_GROWTH_MB = 300
HOSTILE_KEY, STREAMS_KEY = "hostile", "streams"
HEALTH_SECONDS = 10.0
STREAM = {"prompt": "Once upon a time", "max_tokens": 400, "stream": True, "ignore_eos": True}
MEGABYTE = b" " * 1_000_000
INTEGERS = b'{"prompt":"a","max_tokens":1,"zz":[' + b",".join([b"9" * 4_000] * 7_000) + b"]}"
UNSENT = 1_000_000  # bytes


class Stream(threading.Thread):
    """One stream after the other; the longest time without an event."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._address = server.address
        self._schedule = Path(f"/proc/{server.pid}/task/{server.pid}/schedstat")
        self._computed = self._computed_s()
        self._busy = 0.0
        self._last = time.monotonic()
        self._gap = 0.0
        self._num_events = 0
        self.errors: list[str] = []
        self.start()

    def run(self) -> None:
        while True:
            try:
                self._stream()
            except OSError as error:
                self.errors.append(repr(error))
                time.sleep(0.1)

    def _stream(self) -> None:
        connection = HTTPConnection(self._address, timeout=60)
        headers = {"authorization": f"Bearer {STREAMS_KEY}"}
        connection.request("POST", "/v1/completions", json.dumps(STREAM), headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise OSError(f"{reply.status}: {reply.read()[:200]!r}")
        while line := reply.readline():
            if line.startswith(b"data:"):
                now = time.monotonic()
                self._gap = max(self._gap, now - self._last)
                self._last, self._num_events = now, self._num_events + 1
                computed = self._computed_s()
                self._busy = max(self._busy, computed - self._computed)
                self._computed = computed

    def _computed_s(self) -> float:
        return int(self._schedule.read_text().split()[0]) / 1e9

    def take(self) -> tuple[float, float, int]:
        """Since the last time: the longest gap, the longest time that the server's thread computed
        in one, both in seconds, and the number of events."""
        found = max(self._gap, time.monotonic() - self._last), self._busy, self._num_events
        self._gap = self._busy = self._num_events = 0
        return found


def head(key: str, framing: bytes) -> bytes:
    authorization = b"Authorization: Bearer %b\r\n" % key.encode() if key else b""
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%b%b\r\n\r\n" % (
        authorization,
        framing,
    )


def send(address: tuple[str, int], pieces: Iterator[bytes], *, answered: bool) -> socket.socket:
    client = socket.create_connection(address, timeout=60)
    with suppress(OSError):  # refused before it was sent
        for piece in pieces:
            client.sendall(piece)
        while answered and client.recv(65536):
            pass
    return client


def chunks(address: tuple[str, int], key: str, until: float) -> None:
    def attack() -> None:
        while time.monotonic() < until:
            pieces = [head(key, b"Transfer-Encoding: chunked"), b"1\r\n \r\n" * 160_000]
            send(address, iter(pieces), answered=True).close()

    in_threads([attack] * 8)


def bodies(address: tuple[str, int], key: str, until: float) -> None:
    framing = head(key, b"Content-Length: %d" % (28 * len(MEGABYTE) + UNSENT))
    open_ones: list[socket.socket] = []

    def attack() -> None:
        pieces = iter([framing, *repeat(MEGABYTE, 28)])
        open_ones.append(send(address, pieces, answered=False))

    in_threads([attack] * 50)
    time.sleep(max(0.0, until - time.monotonic()))


def integers(address: tuple[str, int], key: str, until: float) -> None:
    framing = head(key, b"Connection: close\r\nContent-Length: %d" % len(INTEGERS))

    def attack() -> None:
        while time.monotonic() < until:
            send(address, iter([framing, INTEGERS]), answered=True).close()

    in_threads([attack] * 3)


def grammars(address: tuple[str, int], key: str, until: float) -> None:
    numbers = itertools.count()

    def attack() -> None:
        while time.monotonic() < until:
            number = next(numbers)
            length = 30 + 10 * (number % 10)
            rules = [
                f"s{n}: " + " | ".join(f"s{k} s{n - k}" for k in range(1, n))
                for n in range(2, length + 1)
            ]
            text = "\n".join([f'start: ("x" | "{number}") "-" s{length}', 's1: "a"', *rules])
            body = json.dumps({"prompt": "x", "max_tokens": 100, "ebnf": text}).encode()
            framing = head(key, b"Connection: close\r\nContent-Length: %d" % len(body))
            send(address, iter([framing, body]), answered=True).close()

    in_threads([attack] * 4)


def heads(address: tuple[str, int], key: str, until: float) -> None:
    halves = [send(address, iter([b"GET / HT"]), answered=False) for _ in range(1_024)]
    began = time.monotonic()
    connection = HTTPConnection(*address, timeout=HEALTH_SECONDS)
    connection.request("GET", "/health")
    status = connection.getresponse().status
    print(f"/health: {status} after {1000 * (time.monotonic() - began):.0f} ms", flush=True)
    if status != 200:
        raise SystemExit(1)
    time.sleep(max(0.0, until - time.monotonic()))
    del halves


def in_threads(attacks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=attack) for attack in attacks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


ATTACKS = {attack.__name__: attack for attack in (chunks, bodies, integers, grammars, heads)}


def run_attack(name: str, address: str, key: str, seconds: float) -> None:
    """In a process of its own."""
    os.nice(19)  # clients elsewhere take no time of the server's machine
    host, _, port = address.partition(":")
    ATTACKS[name]((host, int(port)), key, time.monotonic() + seconds)


def measure(server: Server, stream: Stream, name: str, key: str, seconds: float) -> list[str]:
    stream.take()
    time.sleep(seconds)
    quiet, _, num_quiet = stream.take()
    before, cpu, highest = rss_mb(server.pid), cpu_s(server.pid), 0.0
    began = time.monotonic()
    attack = Process(target=run_attack, args=(name, server.address, key, seconds))
    attack.start()
    while attack.is_alive():
        highest = max(highest, rss_mb(server.pid))
        time.sleep(0.02)
    taken = time.monotonic() - began
    gap, busy, num_events = stream.take()
    growth, cpu = highest - before, cpu_s(server.pid) - cpu
    who = f"{name}, {'with' if key else 'without'} a key"
    print(
        f"{who}: longest gap {1000 * gap:.0f} ms (alone {1000 * quiet:.0f}), busy {1000 * busy:.0f}, "
        f"{num_events / taken:.0f} tokens/s (alone {num_quiet / seconds:.0f}), "
        f"memory +{growth:.0f} MB, CPU {cpu:.1f} s in {taken:.1f} s",
        flush=True,
    )
    faults = [f"{who}: the attack failed"] if attack.exitcode else []
    if gap > LONGEST_GAP_S:
        faults.append(f"{who}: a gap of {1000 * gap:.0f} ms")
    if growth > MOST_GROWTH_MB:
        faults.append(f"{who}: {growth:.0f} MB more memory")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack")
    parser.add_argument("--only", choices=ATTACKS, help="this attack alone")
    given = parser.parse_args()
    faults = []
    with serving("--api-key", HOSTILE_KEY, "--api-key", STREAMS_KEY) as server:
        stream = Stream(server)
        for name in [given.only] if given.only else ATTACKS:
            for key in ("", HOSTILE_KEY):
                faults += measure(server, stream, name, key, given.seconds)
        faults += stream.errors
    print(f"{len(faults)} faults", *faults, sep="\n  ")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
