"""A child of the zygote: compiles one grammar within limits, answers, and exits.

Knows no other grammar. Nothing is cleaned up: the process exits after one grammar.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pippin.decode.prover import (
    CPU_SECONDS,
    MEMORY_BYTES,
    STACK_BYTES,
    WALL_SECONDS,
    Verdict,
    decode_job,
    encode_answer,
    verdict_of_death,
    verdict_on,
)
from pippin.types import GrammarSpec

RESERVED_BYTES = 192 << 20  # addresses that a thread's stack and malloc's arenas take unused

Prove = Callable[[GrammarSpec], None]


def work(zygote: socket.socket, prove: Prove) -> NoReturn:
    """Wait for a grammar, or for the zygote's end; answer; exit."""
    try:
        _drop_inherited(zygote.fileno())
        _limit()
        with zygote.makefile("rb") as jobs:
            line = jobs.readline()
        if line:
            _, spec = decode_job(line)
            # Smaller than the stacks of the engine's threads; a main thread's size is not known.
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=_answer, args=(zygote, prove, spec))
            thread.start()
            thread.join()
    finally:
        os._exit(0)


def _answer(zygote: socket.socket, prove: Prove, spec: GrammarSpec) -> None:
    try:
        prove(spec)
        verdict = Verdict()
    except BaseException as error:  # a panic of Rust's is no Exception
        verdict = verdict_on(spec, error)
    with contextlib.suppress(OSError):  # the zygote is gone, and with it the engine
        zygote.sendall(verdict.encode())


def _drop_inherited(own: int) -> None:
    """Close the channels to the engine and to other children, which only the zygote may keep."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.closerange(3, own)
    os.closerange(own + 1, min(most, 4096) if most != resource.RLIM_INFINITY else 4096)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    if sys.platform == "linux":  # macOS knows the limit and does not enforce it
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES + RESERVED_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


NUM_IDLE = 2  # children that are forked before a grammar arrives
CHUNK_BYTES = 1 << 16


@dataclass
class _Child:
    pid: int
    channel: socket.socket
    number: int | None = None  # of the grammar that it compiles; None: it waits for one
    kind: str = ""
    deadline: float = float("inf")
    late: bool = False
    answer: bytes = b""


class Zygote:
    def __init__(self, prove: Prove, inbox: int, outbox: int) -> None:
        self._prove = prove
        self._inbox = inbox
        self._outbox = outbox
        self._unread = b""
        self._idle: list[_Child] = []
        self._busy: list[_Child] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until the engine is gone."""
        gc.collect()
        gc.freeze()  # so that a child's collector does not write to pages that all share
        self._selector.register(self._inbox, selectors.EVENT_READ)
        try:
            while True:
                while len(self._idle) < NUM_IDLE:
                    self._idle.append(self._fork())
                for key, _ in self._selector.select(self._patience):
                    if key.data is not None:
                        self._receive(key.data)
                    elif not self._take_jobs():
                        return
                self._kill_late()
        except BrokenPipeError:  # the engine does not wait for a verdict any more
            return
        finally:
            for child in (*self._idle, *self._busy):
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)

    @property
    def _patience(self) -> float | None:
        first = min((child.deadline for child in self._busy if not child.late), default=None)
        return None if first is None else max(0.0, first - time.monotonic())

    def _take_jobs(self) -> bool:
        """False once the engine is gone."""
        received = os.read(self._inbox, CHUNK_BYTES)
        *lines, self._unread = (self._unread + received).split(b"\n")
        for line in lines:
            self._start(line)
        return bool(received)

    def _start(self, line: bytes) -> None:
        child = self._idle.pop(0) if self._idle else self._fork()
        child.number, spec = decode_job(line)
        child.kind = spec.kind
        child.deadline = time.monotonic() + WALL_SECONDS
        self._busy.append(child)
        try:
            child.channel.sendall(line + b"\n")
        except OSError:  # it was killed while it waited: `_receive` handles its end
            return

    def _receive(self, child: _Child) -> None:
        """Part of its answer, or that it ended."""
        try:
            received = child.channel.recv(CHUNK_BYTES)
        except ConnectionResetError:
            received = b""
        if received:
            child.answer += received
            return
        self._selector.unregister(child.channel)
        child.channel.close()
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        if child.number is None:
            self._idle.remove(child)
            return
        self._busy.remove(child)
        if child.answer.endswith(b"\n"):
            verdict = Verdict.decode(child.answer)
        else:
            verdict = verdict_of_death(child.kind, status, late=child.late)
        _write(self._outbox, encode_answer(child.number, verdict))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in self._busy:
            if child.deadline <= now and not child.late:
                child.late = True
                os.kill(child.pid, signal.SIGKILL)

    def _fork(self) -> _Child:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            work(theirs, self._prove)
        theirs.close()
        child = _Child(pid, ours)
        self._selector.register(ours, selectors.EVENT_READ, child)
        return child


def _write(descriptor: int, frame: bytes) -> None:
    while frame:
        frame = frame[os.write(descriptor, frame) :]
