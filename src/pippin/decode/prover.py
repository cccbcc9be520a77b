"""Compiles each grammar in a child process first: what it does there costs one request an error.

    engine (Prover)  ──  grammar  ──▶  server  ── the same line ──▶  a child
    engine           ◀── verdict ────  server  ◀──   verdict   ────  exits

A zygote has loaded the vocabulary, and forks servers, each with a channel to the engine. A server
forks a child for each grammar, one after the other, which compiles it within limits. For a child
that died without an answer the verdict names the limit that it exceeded.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

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


def encode_line(value: GrammarSpec | Verdict) -> bytes:
    return json.dumps(asdict(value)).encode() + b"\n"


def decode_spec(line: bytes) -> GrammarSpec:
    spec = json.loads(line)
    parts = tuple(GrammarPart(**part) for part in spec["parts"])
    return GrammarSpec(spec["kind"], spec["text"], parts)


# For a vocabulary to be built, on a machine that has much else to do, and then for an answer:
# beyond that the zygote itself hangs.
ANSWER_SECONDS = 300.0 + WALL_SECONDS
EXIT_SECONDS = 0.5
ATTEMPTS = 2  # a zygote may be killed for another reason than the grammar
NUM_SERVERS = 2  # a large grammar does not hold up a small one


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
        pairs = [socket.socketpair() for _ in range(NUM_SERVERS)]
        theirs = [their.fileno() for _, their in pairs]
        # A session of its own: Ctrl-C in a program with an `LLM` is for that program. What a
        # library prints goes to stderr.
        self._process = subprocess.Popen(
            [*command, *map(str, theirs)],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=theirs,
            start_new_session=True,
        )
        self._servers: list[tuple[socket.socket, BinaryIO]] = []
        self._idle: queue.SimpleQueue[tuple[socket.socket, BinaryIO]] = queue.SimpleQueue()
        for ours, their in pairs:
            their.close()
            ours.settimeout(ANSWER_SECONDS)
            self._servers.append((ours, ours.makefile("rb")))
            self._idle.put(self._servers[-1])
        self.ended = False

    def set_up(self, setup: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as setting_up:
                setting_up.write(json.dumps(setup).encode() + b"\n")

    def prove(self, spec: GrammarSpec) -> Verdict:
        server = channel, answers = self._idle.get()
        why, line = "ended", b""
        try:
            channel.sendall(encode_line(spec))
            line = answers.readline()
        except TimeoutError:
            why = "does not answer"
        except OSError:  # it ended before it could read all of the grammar
            pass
        finally:
            self._idle.put(server)
        if line.endswith(b"\n"):
            return Verdict(**json.loads(line))
        self.close()
        return lost(f"the process that has the vocabulary {why}")

    def close(self) -> None:
        """Its servers end where their channels do, and it ends after them."""
        self.ended = True
        self.set_up({})
        for channel, answers in self._servers:
            with contextlib.suppress(OSError):  # of a channel whose server is gone
                channel.shutdown(socket.SHUT_RDWR)
            answers.close()
            channel.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(PermissionError):  # macOS's, if it ends just now
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


# ---- the zygote, and its children -------------------------------------------------------------

RESERVED_BYTES = 192 << 20  # addresses that a thread's stack and malloc's arenas take unused

Prove = Callable[[GrammarSpec], None]


def work(server: socket.socket, prove: Prove) -> NoReturn:
    """Wait for a grammar, or for the server's end; answer; exit."""
    try:
        _drop_inherited(server.fileno())
        _limit()
        with server.makefile("rb") as jobs:
            line = jobs.readline()
        if line:
            # Smaller than the stacks of the engine's threads; a main thread's size is not known.
            threading.stack_size(STACK_BYTES)
            thread = threading.Thread(target=_answer, args=(server, prove, decode_spec(line)))
            thread.start()
            thread.join()
    finally:
        os._exit(0)


def _answer(server: socket.socket, prove: Prove, spec: GrammarSpec) -> None:
    try:
        prove(spec)
        verdict = Verdict()
    except BaseException as error:  # a panic of Rust's is no Exception
        verdict = verdict_on(spec, error)
    with contextlib.suppress(OSError):  # the server is gone, and with it the engine
        server.sendall(encode_line(verdict))


def _drop_inherited(own: int) -> None:
    """Close the channels to the engine and to other children, which only the server may keep."""
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


CHUNK_BYTES = 1 << 16


def run_zygote(prove: Prove, channels: Sequence[int]) -> None:
    """Until the engine is gone."""
    gc.collect()
    gc.freeze()  # so that a child's collector does not write to pages that all share
    for channel in channels:
        if os.fork() == 0:
            try:
                engine = socket.socket(fileno=os.dup(channel))
                for each in channels:
                    os.close(each)
                _serve(engine, prove)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
    for channel in channels:
        os.close(channel)
    for _ in channels:
        os.wait()


def _serve(engine: socket.socket, prove: Prove) -> None:
    gone = contextlib.suppress(BrokenPipeError, ConnectionResetError)  # an engine that was killed
    with engine.makefile("rb") as jobs, gone:
        while True:
            with _forked(prove) as child:  # before there is a grammar for it
                line = jobs.readline()
                if not line or not child.ask(line, engine):
                    return
            engine.sendall(encode_line(child.verdict(decode_spec(line).kind)))


@dataclass
class _Child:
    pid: int
    channel: socket.socket
    late: bool = False
    answer: bytes = b""
    status: int = 0  # as `os.waitstatus_to_exitcode` has it

    def ask(self, line: bytes, engine: socket.socket) -> bool:
        """Wait for its answer, or its end; False if the engine is gone."""
        with contextlib.suppress(OSError):  # it was killed while it waited
            self.channel.sendall(line)
        deadline = time.monotonic() + WALL_SECONDS
        while not self.answer.endswith(b"\n"):
            patience = None if self.late else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.channel, engine], [], [], patience)
            if engine in ready:
                return False
            if not ready:
                self.late = True
                os.kill(self.pid, signal.SIGKILL)
                continue
            try:
                received = self.channel.recv(CHUNK_BYTES)
            except ConnectionResetError:
                received = b""
            if not received:
                break
            self.answer += received
        return True

    def verdict(self, kind: str) -> Verdict:
        if self.answer.endswith(b"\n"):
            return Verdict(**json.loads(self.answer))  # no child answers for another one
        return verdict_of_death(kind, self.status, late=self.late)


@contextmanager
def _forked(prove: Prove) -> Iterator[_Child]:
    """A child, which has ended behind the block."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        work(theirs, prove)
    theirs.close()
    child = _Child(pid, ours)
    try:
        yield child
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)  # without effect where it ends already
        child.status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
