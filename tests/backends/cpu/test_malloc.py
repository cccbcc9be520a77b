"""What is freed is kept for the next use, and given back when the process would grow too large."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.malloc import has_glibc
from pippin.backends.mlx.device import on_cpu
from processes import run_python
from serving import served

glibc_only = pytest.mark.skipif(not (has_glibc() and on_cpu()), reason="needs glibc, and a CPU")

# Short-lived buffers between long-lived ones, as activations are between blocks of the cache.
HOLES = """
import gc
import mlx.core as mx
from pippin.backends.mlx.cpu.malloc import (
    STEPS_BETWEEN_CHECKS, ResidentLimit, keep_large_buffers, resident_bytes)

MB = 1 << 20
assert keep_large_buffers()
limit = ResidentLimit({room} * MB)
before = resident_bytes()
pairs = [(mx.ones(MB // 4 // 16), mx.ones(4 * MB // 4)) for _ in range(40)]  # 64 KB, 4 MB
mx.eval(pairs)
kept = [small for small, _ in pairs]
full = resident_bytes()
pairs.clear()
gc.collect()
mx.synchronize()
freed = resident_bytes()
for _ in range(STEPS_BETWEEN_CHECKS):
    limit.keep()
print((full - before) // MB, (freed - before) // MB, (resident_bytes() - before) // MB)
"""


@glibc_only
def test_freed_memory_stays_while_there_is_room() -> None:
    full, freed, after = map(int, run_python(HOLES.format(room=400)).split())
    assert min(full, freed, after) >= 140


@glibc_only
def test_freed_memory_is_given_back_when_there_is_none() -> None:
    full, freed, after = map(int, run_python(HOLES.format(room=20)).split())
    assert min(full, freed) >= 140
    assert after < 40


@glibc_only
def test_trimming_that_does_not_help_is_not_tried_every_time() -> None:
    code = """
import mlx.core as mx
from pippin.backends.mlx.cpu import malloc

limit = malloc.ResidentLimit(0)
held = mx.ones(32 << 20)  # beyond the limit, and in use
mx.eval(held)
trims = []
limit._trim = lambda pad: trims.append(pad)
for _ in range(10 * malloc.STEPS_BETWEEN_CHECKS):
    limit.keep()
print(len(trims))
"""
    assert run_python(code) == "1"


@glibc_only
def test_a_budget_limits_what_the_process_holds() -> None:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    try:
        backend = MLXBackend(served("llama"), num_slots=1)
        assert backend._resident is None
        backend.limit_memory(backend.memory_used() + (64 << 20))
        assert backend._resident is not None
    finally:
        mx.set_memory_limit(memory)
        mx.set_cache_limit(cache)
