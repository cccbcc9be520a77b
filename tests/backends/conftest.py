"""Tests of many small models: without the C++ compiler that mlx calls on Linux CPUs.

Every family brings functions of its own for `mx.compile`, and building their kernels takes longer
than all these tests. Compiled steps are tested on the bundled model, in tests/test_served_model.py
and tests/backends/rows/test_compiled_steps.py.
"""

from __future__ import annotations

import pytest

COMPILED = {"test_activations", "test_blas", "test_compiled_steps"}


@pytest.fixture(autouse=True, scope="module")
def compiler_only_where_it_is_tested(request: pytest.FixtureRequest) -> None:
    if request.module.__name__ not in COMPILED:
        request.getfixturevalue("without_compiler")
