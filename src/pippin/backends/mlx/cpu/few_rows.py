"""A kernel for products of few rows, in front of OpenBLAS. Knows no models.

Before a product OpenBLAS copies the weights into its own order, which for the handful of rows of a
decode step costs more than the product. `few_rows.cpp` reads them once and as they lie.

    libmlx: call cblas_sgemm  ->  few_rows_sgemm  ->  few rows: ours
                                                  ->  all others: OpenBLAS

It is built with g++ for the CPU at hand, once, into the user's cache directory, and held against
OpenBLAS: up to how many rows it is faster is timed then and remembered beside it. Without a
compiler, or where it is off, OpenBLAS multiplies everything.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
from platformdirs import user_cache_path

from pippin.backends.mlx.cpu.blas import load_fast_blas, sgemm_slot
from pippin.backends.mlx.cpu.elf import load_address, read_slot, write_slot
from pippin.native_kernels import cpu_identity

SOURCE = Path(__file__).with_name("few_rows.cpp")
# Headers by name: the compiler may be a script that copies the source (native_kernels).
HEADER = SOURCE.parent / "operations" / "pool.h"
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-pthread", "-shared", "-fPIC", "-fno-gnu-unique"),
    f"-I{SOURCE.parent}",
)
BUILD_SECONDS = 120
TIMED_ROWS = (4, 8, 12, 16, 24, 32)
TIMED_WEIGHTS = ((1536, 512), (512, 1536))
REPEATS = 9
WORTHWHILE = 0.95  # of OpenBLAS's time
TOLERANCE = 1e-4  # of sums of 1,536 products of numbers around 1

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # CBLAS's numbers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FewRowsReport:
    """Up to how many rows products are ours; 0 with the reason why none is."""

    max_rows: int = 0
    reason: str | None = None


@functools.cache
def use_few_rows_kernel() -> FewRowsReport:
    """From now on, in this process. The first call on a machine takes some seconds."""
    report = load_fast_blas()
    if not report.loaded or report.threads is None:
        return FewRowsReport(reason=report.reason or "the BLAS is not OpenBLAS")
    compiler = shutil.which("g++")
    if compiler is None:
        return FewRowsReport(reason="no g++ on PATH")
    try:
        library = _built(Path(compiler))
        kernel = _Kernel(library, sgemm_slot(), report.threads)
        max_rows = _remembered(library.with_suffix(".json"), kernel.fastest_rows)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("products of few rows are left to OpenBLAS: %s", error)
        return FewRowsReport(reason=str(error))
    if not max_rows:
        return FewRowsReport(reason="OpenBLAS is as fast here")
    kernel.take_over(max_rows)
    return FewRowsReport(max_rows)


def _built(compiler: Path) -> Path:
    sources = (SOURCE.read_bytes(), HEADER.read_bytes())
    facts = (sources, FLAGS, TIMED_ROWS, TIMED_WEIGHTS)  # it, and what was timed
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    directory = user_cache_path("pippin") / "kernels" / cpu_identity(compiler)
    library = directory / f"few_rows-{name}.so"
    if not library.exists():
        directory.mkdir(parents=True, exist_ok=True)
        whole = library.with_name(f"{library.name}.{os.getpid()}")
        command = [str(compiler), *FLAGS, str(SOURCE), "-o", str(whole)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
        if built.returncode:
            raise OSError(f"g++: {built.stderr.strip().splitlines()[-1:]}")
        whole.replace(library)  # other processes see all of it or nothing
    return library


def _remembered(path: Path, find_out: Callable[[], int]) -> int:
    """The same in every process on this machine, so that the same rows are rounded alike."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=int)
    except FileNotFoundError:
        found = find_out()
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_bytes(msgspec.json.encode(found))
        whole.replace(path)
        return found
    except msgspec.DecodeError as error:
        raise OSError(f"{path} is damaged ({error}): delete it") from error


class _Kernel:
    """`slot`: where libmlx looks up whom to call for a product; at first OpenBLAS."""

    def __init__(self, library: Path, slot: int, threads: int) -> None:
        self._library = ctypes.CDLL(str(library), mode=os.RTLD_LOCAL | os.RTLD_NOW)
        self._slot = slot
        self._library.few_rows_start(ctypes.c_void_p(read_slot(slot)), threads)

    def take_over(self, max_rows: int) -> None:
        self._library.few_rows_set(max_rows)
        write_slot(self._slot, load_address(self._library, "few_rows_sgemm"))

    def fastest_rows(self) -> int:
        """Up to how many rows ours is right and faster; 0: not for any number."""
        fastest = 0
        for num_rows in TIMED_ROWS:
            if not all(self._is_faster(num_rows, *weights) for weights in TIMED_WEIGHTS):
                break
            fastest = num_rows
        return fastest

    def _is_faster(self, num_rows: int, num_outputs: int, num_inputs: int) -> bool:
        draw = np.random.default_rng(0)
        x = draw.standard_normal((num_rows, num_inputs), dtype=np.float32)
        # More than a cache holds: a step finds its weights in memory.
        weights = draw.standard_normal((8, num_outputs, num_inputs), dtype=np.float32)
        pairs = [
            (self._run(0, x, weights), self._run(num_rows, x, weights)) for _ in range(REPEATS)
        ]
        (_, expected), (_, found) = pairs[0]
        error = float(np.abs(found - expected).max())
        if not error < TOLERANCE * num_inputs**0.5:
            raise OSError(f"the kernel for few rows is off by {error:.0e}")
        # The shortest of a few runs: others may be using the machine.
        theirs = min(run[0] for run, _ in pairs)
        ours = min(run[0] for _, run in pairs)
        return ours < WORTHWHILE * theirs

    def _run(self, max_rows: int, x: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Seconds, and the last product."""
        self._library.few_rows_set(max_rows)
        y = np.zeros((len(x), weights.shape[1]), np.float32)
        began = perf_counter()
        for weight in weights:
            self._multiply(x, weight, y)
        return perf_counter() - began, y

    def _multiply(self, x: np.ndarray, weight: np.ndarray, y: np.ndarray) -> None:
        (m, k), n = x.shape, len(weight)
        a, b, c = (ctypes.c_void_p(array.ctypes.data) for array in (x, weight, y))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        sizes = (ROW_MAJOR, AS_IT_IS, TRANSPOSED, m, n, k)
        self._library.few_rows_sgemm(*sizes, one, a, k, b, k, zero, c, n)
