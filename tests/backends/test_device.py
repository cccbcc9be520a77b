"""The byte budget reaches mlx."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from pippin.backends.mlx.device import limit_memory, on_cpu


@pytest.fixture
def limits_restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("limits_restored")
@pytest.mark.parametrize("budget", [1 << 28, 3 << 30, 1 << 36])
def test_mlx_is_told_the_budget(budget: int) -> None:
    """Spare buffers are part of it: on GPUs mlx itself sees to that."""
    usable = limit_memory(budget)
    memory, spare = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    assert memory == usable
    assert memory + spare == budget if on_cpu() else memory == budget
    assert 0 < spare <= budget / 4


@pytest.mark.usefixtures("limits_restored")
@pytest.mark.skipif(not on_cpu(), reason="of CPUs")
def test_spare_buffers_are_beside_the_limit_on_cpus() -> None:
    """What `limit_memory` knows of mlx: if this fails, they need not be taken off any more."""
    mx.set_cache_limit(64 << 20)
    mx.set_memory_limit(mx.get_active_memory() + (40 << 20))
    array = mx.zeros(32 << 18)
    mx.eval(array)
    del array
    kept = mx.get_cache_memory()
    other = mx.zeros(36 << 18)
    mx.eval(other)
    assert mx.get_cache_memory() >= kept >= 32 << 20
