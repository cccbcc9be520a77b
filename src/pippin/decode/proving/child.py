"""A child of the zygote: compiles one grammar within limits, answers, and exits.

Knows no other grammar. Nothing is cleaned up: the process exits after one grammar.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from pippin.decode.proving.verdicts import (
    CPU_SECONDS,
    MEMORY_BYTES,
    STACK_BYTES,
    Verdict,
    decode_job,
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
