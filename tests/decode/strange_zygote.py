"""A zygote whose children do what a grammar's text says: die, hang, allocate. Run as a process."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time

from walks import bundled_vocabulary

from pippin.decode import prover
from pippin.decode.compile import compile_grammar
from pippin.errors import ContextOverflow
from pippin.types import GrammarSpec

GIB = 1 << 30


def prove(spec: GrammarSpec) -> None:
    what, _, amount = spec.text.partition(" ")
    match what:
        case "compile":
            compile_grammar(GrammarSpec("ebnf", amount), bundled_vocabulary())
        case "signal":
            signal.raise_signal(signal.Signals[amount])  # of this thread, at once
        case "allocate":
            bytearray(int(amount) * GIB)
        case "compute":
            while True:
                pass
        case "sleep":
            time.sleep(float(amount))
        case "refuse":
            raise ContextOverflow(amount, param="some.field")
        case "raise":
            raise ValueError(amount)
        case "tell":
            told = {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "open": [fd for fd in range(64) if _is_open(fd)],
                "threads": threading.active_count(),
                "cores": resource.getrlimit(resource.RLIMIT_CORE)[0],
            }
            raise ContextOverflow(json.dumps(told))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    setup = json.loads(sys.stdin.readline())
    prover.CPU_SECONDS = setup.get("cpu_seconds", prover.CPU_SECONDS)
    prover.WALL_SECONDS = setup.get("wall_seconds", prover.WALL_SECONDS)
    if setup.get("vocabulary"):
        bundled_vocabulary()
    prover.run_zygote(prove, [int(fd) for fd in sys.argv[1:]])
    sys.exit(0)
