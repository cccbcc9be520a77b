"""Compiles each grammar in a child process first: what it does there costs one request an error.

    engine (Prover)  ── [number, grammar] ──▶  zygote  ── the same line ──▶  a child
    engine           ◀─ [number, verdict] ───  zygote  ◀── [verdict] ──────  exits

A zygote has loaded the vocabulary. It forks a child for each grammar, which compiles it within
limits. For a child that died without an answer the verdict names the limit that it exceeded.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from pippin.errors import STATUSES, NotReady, PippinError, RequestError, error_of
from pippin.types import GrammarPart, GrammarSpec

STACK_BYTES = 16 << 20  # of a child's thread
MEMORY_BYTES = 512 << 20  # that a child may add to the vocabulary's; not enforced on macOS
CPU_SECONDS = 4
WALL_SECONDS = 30.0  # on a machine that has much else to do

_LATE = f"compiling it takes more than {CPU_SECONDS} s"
_TOO_DEEP = f"compiling it takes more than {STACK_BYTES >> 20} MiB of stack"
_TOO_BIG = f"compiling it takes more than {MEMORY_BYTES >> 20} MiB of memory"
_DEATHS = {
    signal.SIGXCPU: _LATE,
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGABRT: _TOO_BIG,  # how Rust ends when an allocation fails
}


@dataclass(frozen=True)
class Verdict:
    """Without an error: the grammar was compiled."""

    error: str | None = None
    code: str | None = None
    status: int = STATUSES[RequestError.code]
    param: str | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            error = error_of(self.error, self.code, self.status)
            error.param = self.param
            raise error

    @property
    def is_final(self) -> bool:
        """Whether the same grammar would get the same verdict again."""
        return self.code != NotReady.code


def verdict_on(spec: GrammarSpec, error: BaseException) -> Verdict:
    """The verdict for an error that a child raised."""
    if isinstance(error, PippinError):
        return Verdict(error.message, error.code, error.status, error.param)
    if isinstance(error, MemoryError):
        return refused(spec.kind, _TOO_BIG)
    return refused(spec.kind, str(error)[:500] or repr(error)[:500])  # a library's own words


def verdict_of_death(kind: str, status: int, *, late: bool) -> Verdict:
    """Of a child that ended without an answer; `status` as `os.waitstatus_to_exitcode` has it."""
    if late:
        return refused(kind, _LATE)
    if -status in _DEATHS:
        return refused(kind, _DEATHS[signal.Signals(-status)])
    return lost(f"the process that compiled it ended with status {status}")


def refused(kind: str, why: str) -> Verdict:
    return Verdict(f"{kind} is too complex: {why}", RequestError.code, param=kind)


def lost(why: str) -> Verdict:
    """The process failed, not the grammar as far as is known: the client may try again."""
    return Verdict(
        f"the grammar was not compiled: {why}; try again", NotReady.code, STATUSES[NotReady.code]
    )


def encode_line(*values: object) -> bytes:
    return json.dumps(values).encode() + b"\n"


def decode_job(line: bytes) -> tuple[int, GrammarSpec]:
    number, spec = json.loads(line)
    parts = tuple(GrammarPart(**part) for part in spec["parts"])
    return number, GrammarSpec(spec["kind"], spec["text"], parts)


START_SECONDS = 300.0  # for a vocabulary to be built, on a machine that has much else to do
GRACE_SECONDS = 30.0  # beyond a child's deadline: then the zygote itself hangs
EXIT_SECONDS = 0.5
ATTEMPTS = 2  # a zygote may be killed for another reason than the grammar


class Prover:
    def __init__(self, command: Sequence[str]) -> None:
        """Nothing is started before `start`, `load` or the first grammar."""
        self._command = command
        self._setup: dict[str, Any] | None = None
        self._zygote: _ZygoteProcess | None = None
        self._changing = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """The process alone: it imports what it needs, and waits for `set_up`."""
        with self._changing:
            if self._zygote is None and not self._closed:
                self._zygote = _ZygoteProcess(self._command)

    def set_up(self, **setup: Any) -> None:
        """Sent to every zygote as its first line."""
        self._setup = setup

    def load(self) -> None:
        """Start what the first grammar needs."""
        self._running()

    def prove(self, spec: GrammarSpec) -> Verdict:
        """Whether a grammar can be compiled. Blocks; from any thread."""
        verdict = lost("the server is shutting down")
        for _ in range(ATTEMPTS):
            zygote = self._running()
            if zygote is None:
                return verdict
            verdict = zygote.prove(spec)
            if verdict.is_final:
                return verdict
        return verdict

    def close(self) -> None:
        with self._changing:
            self._closed = True
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close()

    def _running(self) -> _ZygoteProcess | None:
        """A zygote that is running and set up; None after `close`."""
        with self._changing:
            if self._closed:
                return None
            if self._zygote is None or self._zygote.ended:
                self._zygote = _ZygoteProcess(self._command)
            assert self._setup is not None, "a zygote needs to know its vocabulary"
            self._zygote.set_up(self._setup)
            return self._zygote


class _ZygoteProcess:
    def __init__(self, command: Sequence[str]) -> None:
        # A session of its own: Ctrl-C in a program with an `LLM` is for that program.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Verdict]] = {}
        self._sending = threading.Lock()
        self._is_set_up = False
        self._is_ready = threading.Event()
        self.ended = False
        self._reader = threading.Thread(target=self._read, name="grammar-verdicts", daemon=True)
        self._reader.start()

    def set_up(self, setup: dict[str, Any]) -> None:
        if not self._is_set_up:
            self._is_set_up = True
            self._send(json.dumps(setup).encode() + b"\n")

    def prove(self, spec: GrammarSpec) -> Verdict:
        self._is_ready.wait(START_SECONDS)
        number, answer = next(self._numbers), Future[Verdict]()
        self._waiting[number] = answer
        self._send(encode_line(number, asdict(spec)))
        if self.ended:  # perhaps before the answer could be listed
            self._lose_all()
        try:
            return answer.result(WALL_SECONDS + GRACE_SECONDS)
        except TimeoutError:
            self._process.kill()
            return lost("the process that has the vocabulary does not answer")
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._close_inbox()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with self._sending:
            if self.ended:
                return
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
            except BrokenPipeError:
                return  # `_read` handles its end

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if not self._is_ready.is_set():
                    self._is_ready.set()
                    continue
                number, verdict = json.loads(line)
                if (waiting := self._waiting.get(number)) is not None:
                    waiting.set_result(Verdict(**verdict))
        self._process.wait()
        self._close_inbox()
        self._is_ready.set()
        self._lose_all()

    def _close_inbox(self) -> None:
        assert self._process.stdin is not None
        with self._sending:
            self.ended = True
            with contextlib.suppress(BrokenPipeError):  # what was written last was never read
                self._process.stdin.close()

    def _lose_all(self) -> None:
        with self._sending:
            for waiting in list(self._waiting.values()):
                if not waiting.done():
                    waiting.set_result(lost("the process that has the vocabulary ended"))


# ---- the zygote, and its children -------------------------------------------------------------

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
        zygote.sendall(encode_line(asdict(verdict)))


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
            [answer] = json.loads(child.answer)
            verdict = Verdict(**answer)  # no child answers for another one
        else:
            verdict = verdict_of_death(child.kind, status, late=child.late)
        frame = encode_line(child.number, asdict(verdict))
        while frame:
            frame = frame[os.write(self._outbox, frame) :]

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
