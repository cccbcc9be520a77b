"""Forks children that compile grammars, and kills those that are late. Knows no grammar's language.

It runs in a process of its own with one thread, and exits when the engine's end of its inbox is
closed, however the engine ended.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass

from pippin.decode.proving.child import Prove, work
from pippin.decode.proving.verdicts import (
    WALL_SECONDS,
    Verdict,
    decode_job,
    encode_answer,
    verdict_of_death,
)

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
