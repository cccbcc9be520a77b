"""Products of few rows: the kernel gives what numpy gives, whatever the shape and whoever calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.cpu import blas, elf, few_rows
from pippin.backends.mlx.device import on_cpu
from processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="macOS has a fast BLAS of its own"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="the kernel is built with g++"),
]

Multiply = Callable[[np.ndarray, np.ndarray], np.ndarray]


@pytest.fixture(scope="module", params=["native", "plain"])
def multiply(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Multiply:
    """x @ w^T by a kernel with two threads that has nobody to pass a product on to."""
    flags = [f for f in few_rows.FLAGS if request.param == "native" or "march" not in f]
    built = tmp_path_factory.mktemp("kernel") / "few_rows.so"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-psabi"]
    subprocess.run(["g++", *flags, *warnings, str(few_rows.SOURCE), "-o", str(built)], check=True)
    library = ctypes.CDLL(str(built))
    library.few_rows_start(ctypes.c_void_p(None), 2)
    library.few_rows_set(64)

    def multiply(x: np.ndarray, w: np.ndarray) -> np.ndarray:
        y = np.full((len(x), len(w)), np.nan, np.float32)
        a, b, c = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, y))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        sizes = (101, 111, 112, len(x), len(w), x.shape[1])
        strides = [array.strides[0] // 4 for array in (x, w, y)]
        library.few_rows_sgemm(*sizes, one, a, strides[0], b, strides[1], zero, c, strides[2])
        return y

    return multiply


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("num_inputs", [128, 384, 387, 1000])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 24, 31, 64])
def test_products_are_right(multiply: Multiply, num_rows: int, num_inputs: int) -> None:
    x, w = draw(num_rows, num_rows, num_inputs), draw(1, 1028, num_inputs)
    expected = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(multiply(x, w) - expected).max() < 1e-3


def test_rows_and_weights_may_be_parts_of_larger_arrays(multiply: Multiply) -> None:
    x, w = draw(0, 5, 600)[:, 40:552], draw(1, 512, 700)[:, 3:515]
    assert np.abs(multiply(x, w) - x @ w.T).max() < 1e-3


def test_a_row_is_the_same_whoever_is_beside_it(multiply: Multiply) -> None:
    x, w = draw(0, 24, 400), draw(1, 512, 400)
    together = multiply(x, w)
    for row in range(24):
        assert (multiply(x[row : row + 1], w)[0] == together[row]).all()
    assert (multiply(x[:7], w) == together[:7]).all()


def test_many_callers_at_once_get_their_own(multiply: Multiply) -> None:
    wrong: list[int] = []

    def call(seed: int) -> None:
        x, w = draw(seed, 1 + seed % 9, 256), draw(seed + 100, 1024, 256)
        expected = x @ w.T
        if any(np.abs(multiply(x, w) - expected).max() > 1e-3 for _ in range(60)):
            wrong.append(seed)

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_infinity_stays_in_its_row(multiply: Multiply) -> None:
    x, w = draw(0, 6, 256), draw(1, 512, 256)
    clean = multiply(x, w)
    x[2, 7] = np.inf
    spoilt = multiply(x, w)
    assert not np.isfinite(spoilt[2]).any()
    assert (np.delete(spoilt, 2, 0) == np.delete(clean, 2, 0)).all()


@pytest.mark.skipif(not on_cpu(), reason="products are a GPU's here")
def test_mlx_calls_it() -> None:
    """Where libmlx looks up its products it finds ours, and these are right."""
    report = few_rows.use_few_rows_kernel()
    if not report.max_rows:
        pytest.skip(f"not used here: {report.reason}")
    openblas = ctypes.CDLL(str(blas.load_fast_blas().path))
    theirs = [p + "cblas_sgemm" for p in blas.PREFIXES if hasattr(openblas, p + "cblas_sgemm")]
    assert elf.read_slot(blas.sgemm_slot()) != elf.load_address(openblas, theirs[0])
    x, w = mx.random.normal((report.max_rows, 1024)), mx.random.normal((2048, 1024))
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    together = np.asarray(x @ w.T)
    assert np.abs(together - expected).max() < 1e-3
    assert (np.asarray(x[:1] @ w.T)[0] == together[0]).all()  # OpenBLAS takes another road for one


def test_what_was_timed_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "few_rows.json"
    assert few_rows._remembered(path, lambda: 16) == 16
    assert few_rows._remembered(path, lambda: 4) == 16
    path.write_text("{")
    with pytest.raises(OSError, match="delete it"):
        few_rows._remembered(path, lambda: 4)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [({"PATH": "/nowhere"}, "no g++ on PATH"), ({"PIPPIN_BLAS": "off"}, "PIPPIN_BLAS=off")],
)
def test_without_it_openblas_multiplies(environment: dict[str, str], reason: str) -> None:
    code = """
from pippin.backends.mlx.cpu.few_rows import use_few_rows_kernel
print(use_few_rows_kernel().reason)
"""
    assert run_python(code, **environment) == reason


def test_a_child_of_a_fork_multiplies_too() -> None:
    code = """
import os
import ctypes
import shutil
import numpy as np
from pippin.backends.mlx.cpu.few_rows import _built
from pathlib import Path
library = ctypes.CDLL(str(_built(Path(shutil.which("g++")))))
library.few_rows_start(None, 2)
library.few_rows_set(8)
x, w = np.ones((2, 512), np.float32), np.ones((512, 512), np.float32)
y = np.zeros((2, 512), np.float32)
def multiply():
    a, b, c = (ctypes.c_void_p(array.ctypes.data) for array in (x, w, y))
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    library.few_rows_sgemm(101, 111, 112, 2, 512, 512, one, a, 512, b, 512, zero, c, 512)
    return (y == 512).all()
assert multiply()
y[:] = 0
child = os.fork()
if not child:
    os._exit(0 if multiply() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"
