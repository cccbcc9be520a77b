"""The byte budget reaches mlx."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from pippin.backends.mlx.device import SPARE_BUFFERS_DIVISOR, limit_memory


@pytest.fixture
def limits_restored() -> Iterator[None]:
    memory, cache = mx.set_memory_limit(1 << 40), mx.set_cache_limit(1 << 30)
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)


@pytest.mark.usefixtures("limits_restored")
def test_mlx_is_told_the_budget() -> None:
    limit_memory(3 << 30)
    assert mx.set_memory_limit(1 << 40) == 3 << 30
    assert mx.set_cache_limit(1 << 30) == (3 << 30) // SPARE_BUFFERS_DIVISOR
