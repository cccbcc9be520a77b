"""The redirect of libmlx's matrix products to OpenBLAS, each case in a fresh process."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from pippin.backends.mlx.cpu import blas
from processes import is_installed, run_python

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
@pytest.mark.parametrize("symbol", blas.REDIRECTED)
def test_libmlx_calls_openblas_and_nobody_else_sees_it(symbol: str) -> None:
    code = f"""
import ctypes
from pippin.backends.mlx.cpu import blas, elf
report = blas.load_fast_blas()
assert report.loaded, report.reason
slot = elf.imported_slots(blas.libmlx_path(), ["{symbol}"])["{symbol}"]
library = ctypes.CDLL(report.path)
assert ctypes.c_uint64.from_address(slot).value == elf.load_address(library, "scipy_{symbol}")
print(hasattr(ctypes.CDLL(None), "{symbol}"))
"""
    assert run_python(code, PIPPIN_BLAS="auto") == "False"


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
from pippin.backends.mlx.cpu import blas, elf
before = elf.imported_slots(blas.libmlx_path(), blas.REDIRECTED)
addresses = [ctypes.c_uint64.from_address(slot).value for slot in before.values()]
print(blas.load_fast_blas().reason)
assert addresses == [ctypes.c_uint64.from_address(slot).value for slot in before.values()]
"""
    assert run_python(code + CHECK_PRODUCT, PIPPIN_BLAS="off") == "PIPPIN_BLAS=off"


@linux_only
def test_a_library_that_cannot_be_loaded_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    report = "from pippin.backends.mlx.cpu import blas; print(blas.load_fast_blas().reason)"
    assert "no-such.so" in run_python(
        report + CHECK_PRODUCT, PIPPIN_BLAS=str(tmp_path / "no-such.so")
    )


@linux_only
def test_a_library_without_cblas_is_refused_by_name() -> None:
    report = "from pippin.backends.mlx.cpu import blas; print(blas.load_fast_blas().reason)"
    assert "has no cblas_sgemm" in run_python(report, PIPPIN_BLAS="libc.so.6")


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
