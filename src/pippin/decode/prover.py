"""What the engine asks and what children answer, one line of JSON each. Knows no processes.

For a child that died without an answer the verdict names the limit that it exceeded.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol

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

    def encode(self) -> bytes:
        return _line(asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> Verdict:
        return cls(**json.loads(line))


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


def encode_job(number: int, spec: GrammarSpec) -> bytes:
    return _line({"number": number, **asdict(spec)})


def decode_job(line: bytes) -> tuple[int, GrammarSpec]:
    job = json.loads(line)
    parts = tuple(GrammarPart(**part) for part in job["parts"])
    return job["number"], GrammarSpec(job["kind"], job["text"], parts)


def encode_answer(number: int, verdict: Verdict) -> bytes:
    return _line({"number": number, **asdict(verdict)})


def decode_answer(line: bytes) -> tuple[int, Verdict]:
    answer = json.loads(line)
    return answer.pop("number"), Verdict(**answer)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


START_SECONDS = 300.0  # for a vocabulary to be built, on a machine that has much else to do
GRACE_SECONDS = 30.0  # beyond a child's deadline: then the zygote itself hangs
EXIT_SECONDS = 0.5
ATTEMPTS = 2  # a zygote may be killed for another reason than the grammar


class Proves(Protocol):
    """Finds out whether a grammar can be compiled, without risk to this process."""

    def load(self) -> None:
        """Start what the first grammar needs."""
        ...

    def prove(self, spec: GrammarSpec) -> Verdict:
        """Blocks. From any thread."""
        ...

    def close(self) -> None: ...


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
        self._running()

    def prove(self, spec: GrammarSpec) -> Verdict:
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
        self._send(encode_job(number, spec))
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
                number, verdict = decode_answer(line)
                waiting = self._waiting.get(number)
                if waiting is not None:
                    waiting.set_result(verdict)
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
