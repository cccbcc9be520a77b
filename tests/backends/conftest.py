"""Tests of many small models: without the C++ compiler that mlx calls on Linux CPUs.

Every family brings functions of its own for `mx.compile`, and building their kernels takes longer
than all these tests. Compiled steps are tested on the bundled model, in tests/test_served_model.py
and tests/backends/rows/test_compiled_steps.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest

COMPILED = {"test_activations", "test_blas", "test_compiled_steps"}


@pytest.fixture(autouse=True, scope="module")
def compiler_only_where_it_is_tested(request: pytest.FixtureRequest) -> None:
    if request.module.__name__ not in COMPILED:
        request.getfixturevalue("without_compiler")


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
