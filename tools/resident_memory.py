"""What the system counts as this process's memory, against the budget, under minutes of mixed load.

python tools/resident_memory.py [MINUTES] [MEMORY]      default: 5 420MB

Sixteen clients, prompts of 5 to 2,500 tokens of which 60% begin alike, replies of 4 to 300, and a
tenth of the clients leave early. One process, no HTTP. `mlx` is what mlx holds, its spare buffers
included, `free` what the C library keeps beside it, `rest` what neither knows of: Python and the
libraries.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
from time import perf_counter

from pippin.backends.mlx.cpu.malloc import resident_bytes
from pippin.config import EngineConfig
from pippin.offline.llm import LLM
from pippin.messages import Submit, pack_tokens
from pippin.types import SamplingParams

# isort: split
import mlx.core as mx

CLIENTS = 16
REPORT_SECONDS = 15.0
MB = 1e6


class Mallinfo2(ctypes.Structure):
    """mallinfo2(3): ten numbers, of which one is looked at."""

    _fields_ = [
        ("before", ctypes.c_size_t * 8),
        ("free", ctypes.c_size_t),
        ("after", ctypes.c_size_t),
    ]


def malloc_free_bytes() -> int:
    """Free bytes that malloc keeps; 0 without glibc."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = Mallinfo2
    return int(mallinfo2().free)


class Load:
    """Clients that ask again as soon as they have been answered."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.random = random.Random(1)
        self.beginning = [self.random.randrange(3, 8000) for _ in range(1000)]
        self.ids = itertools.count()
        self.leaving: dict[str, int] = {}  # tokens after which the client has had enough
        self.finished = self.failed = 0
        for _ in range(CLIENTS):
            self.ask()

    def ask(self) -> None:
        draw = self.random
        prompt = [draw.randrange(3, 8000) for _ in range(int(5 * 500 ** draw.random()))]
        if draw.random() < 0.6:
            prompt = self.beginning[: draw.randrange(100, 1000)] + prompt[:1500]
        name = str(next(self.ids))
        params = SamplingParams(max_tokens=draw.randrange(4, 300), ignore_eos=True)
        if draw.random() < 0.1:
            self.leaving[name] = draw.randrange(1, 40)
        self.llm.loop.submit(Submit(name, pack_tokens(prompt), params))

    def step(self) -> None:
        for delta in self.llm.loop.step():
            if delta.id in self.leaving:
                self.leaving[delta.id] -= len(delta.tokens)
                if self.leaving[delta.id] <= 0:
                    del self.leaving[delta.id]
                    self.llm.loop.abort(delta.id)
            if delta.finish is not None:
                self.leaving.pop(delta.id, None)
                self.finished += 1
                self.failed += delta.finish == "error"
                self.ask()


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    memory = sys.argv[2] if len(sys.argv) > 2 else "420MB"
    before = resident_bytes()
    with LLM(engine=EngineConfig(memory=memory)) as llm:
        print(
            f"libraries {before / MB:.0f} MB; loaded {resident_bytes() / MB:.0f} MB; budget {memory}"
        )
        load = Load(llm)
        began = reported = perf_counter()
        while perf_counter() - began < 60 * minutes:
            load.step()
            if perf_counter() - reported >= REPORT_SECONDS:
                reported = perf_counter()
                resident, used, free = resident_bytes(), mx.get_active_memory(), malloc_free_bytes()
                used += mx.get_cache_memory()
                print(
                    f"{reported - began:5.0f} s  resident {resident / MB:5.0f}  mlx {used / MB:5.0f}  "
                    f"free {free / MB:5.0f}  rest {(resident - used - free) / MB:5.0f} MB  "
                    f"{load.finished} finished, {load.failed} failed",
                    flush=True,
                )


if __name__ == "__main__":
    main()
