"""Memory that adds up, for tests that count bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture
def exact_bytes() -> Iterator[None]:
    """Bytes add up: no freed buffers, which may be larger than asked for, are handed out again.

    No cycle collector either: what is done with must go by itself, not sooner or later.
    """
    limit = mx.set_cache_limit(0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    mx.set_cache_limit(limit)
