"""libmlx's matrix products redirected to OpenBLAS, and steps that run ahead."""

from __future__ import annotations

import platform
import subprocess
import sys
from time import perf_counter
from typing import Any

import mlx.core as mx
import pytest

from pippin.backends.mlx.cpu.operations import AHEAD_TOKENS, running_ahead
from processes import environment, is_installed, run_python

linux_only = pytest.mark.skipif(
    platform.system() != "Linux" or not is_installed("scipy_openblas32"),
    reason="redirects BLAS only on Linux with the `cpu` extra",
)


CHECK_PRODUCT = """
import mlx.core as mx, numpy as np
rng = np.random.default_rng(0)
a, b = (rng.standard_normal((129, 129)).astype(np.float32) for _ in "ab")
product = np.array(mx.matmul(mx.array(a), mx.array(b), stream=mx.cpu))
np.testing.assert_allclose(product, a.astype(np.float64) @ b, atol=1e-4)
"""


@linux_only
def test_libmlx_calls_openblas_and_nobody_else_sees_the_rest_of_it() -> None:
    code = """
import ctypes
from pippin.backends.mlx.cpu import blas
report = blas.load_fast_blas()
assert report.loaded, report.reason
everyone = ctypes.CDLL(None)
print(hasattr(everyone, "cblas_sgemm"), hasattr(everyone, "scipy_cblas_sgemm"))
"""
    bound = subprocess.run(
        [sys.executable, "-c", code + CHECK_PRODUCT],
        env=environment() | {"LD_DEBUG": "bindings", "PIPPIN_BLAS": "auto"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert bound.stdout.strip() == "True False"
    calls = [line for line in bound.stderr.splitlines() if "`cblas_sgemm'" in line]
    assert any("libmlx.so" in line and "/blas-" in line for line in calls)


@linux_only
@pytest.mark.parametrize("first", ["load_fast_blas", "mlx.core"])
def test_products_are_right_whether_mlx_is_imported_before_or_after(first: str) -> None:
    load = "from pippin.backends.mlx.cpu.blas import load_fast_blas; assert load_fast_blas().loaded"
    lines = [load, "import mlx.core"] if first == "load_fast_blas" else ["import mlx.core", load]
    run_python("\n".join(lines) + CHECK_PRODUCT, PIPPIN_BLAS="auto")


@linux_only
def test_off_leaves_mlx_alone() -> None:
    code = """
import ctypes
from pippin.backends.mlx.cpu import blas
print(blas.load_fast_blas().reason)
assert not hasattr(ctypes.CDLL(None), "cblas_sgemm")
"""
    assert run_python(code + CHECK_PRODUCT, PIPPIN_BLAS="off") == "PIPPIN_BLAS=off"


@linux_only
@pytest.mark.parametrize(
    ("library", "reason"),
    [("/no-such.so", "no-such.so"), ("libc.so.6", "has no cblas_sgemm")],
)
def test_a_library_that_cannot_be_used_is_a_reason_not_a_crash(library: str, reason: str) -> None:
    report = "from pippin.backends.mlx.cpu import blas; print(blas.load_fast_blas().reason)"
    assert reason in run_python(report + CHECK_PRODUCT, PIPPIN_BLAS=library)


@linux_only
def test_thread_count_follows_the_environment_and_else_what_the_machine_grants() -> None:
    code = "from pippin.backends.mlx.cpu import blas; print(blas.load_fast_blas().threads)"
    quiet = {"PIPPIN_BLAS": "auto", "OMP_NUM_THREADS": ""}
    assert run_python(code, OPENBLAS_NUM_THREADS="1", **quiet) == "1"
    granted = "from pippin.backends.host import num_threads; print(num_threads())"
    free = {**quiet, "OPENBLAS_NUM_THREADS": ""}
    assert run_python(code, **free) == run_python(granted, **free)


@pytest.mark.slow
@linux_only
@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_torch_can_be_imported_and_multiplies_after_the_redirect() -> None:
    code = """
from pippin.backends.mlx.cpu.blas import load_fast_blas
load_fast_blas()
import torch
x = torch.arange(4.0).reshape(2, 2)
print((x @ x).tolist())
"""
    assert run_python(code + CHECK_PRODUCT, PIPPIN_BLAS="auto") == "[[2.0, 3.0], [6.0, 11.0]]"


NODES = 200


def seconds_to_submit(num_tokens: int) -> tuple[float, float]:
    """And those until all is computed."""
    x = mx.full((1 << 18,), 0.5)
    mx.eval(x)
    for _ in range(NODES):
        x = mx.sin(x)
    began = perf_counter()
    with running_ahead(num_tokens):
        mx.async_eval(x)
    submitted = perf_counter()
    mx.eval(x)
    return submitted - began, perf_counter() - began


def test_the_host_is_not_held_up_by_a_step_of_few_tokens(ours: Any) -> None:
    submitted, computed = seconds_to_submit(AHEAD_TOKENS)
    assert submitted < 0.25 * computed
    submitted, computed = seconds_to_submit(AHEAD_TOKENS + 1)
    assert submitted > 0.5 * computed
