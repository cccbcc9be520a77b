"""What the engine asks and what children answer, one line of JSON each. Knows no processes.

For a child that died without an answer the verdict names the limit that it exceeded.
"""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass

from pippin.errors import NotReady, PippinError, RequestError, error_of
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
    status: int = RequestError.status
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
        f"the grammar was not compiled: {why}; try again", NotReady.code, NotReady.status
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
