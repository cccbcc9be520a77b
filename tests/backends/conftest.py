"""Tests of many small models: without the C++ compiler that mlx calls on Linux CPUs.

Every family brings functions of its own for `mx.compile`, and building their kernels takes longer
than all these tests. Compiled steps are tested on the bundled model, in tests/test_served_model.py
and tests/backends/rows/test_compiled_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

COMPILED = {"test_activations", "test_blas", "test_compiled_steps"}


@pytest.fixture(autouse=True, scope="module")
def without_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.module.__name__ in COMPILED:
        yield
        return
    mx.disable_compile()
    yield
    mx.enable_compile()
