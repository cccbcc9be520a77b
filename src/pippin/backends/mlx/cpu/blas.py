"""Fast matrix products on Linux CPUs.

mlx's Linux wheel links the reference BLAS, some fifty times slower than OpenBLAS. PyPI's OpenBLAS
(`scipy-openblas32`) prefixes its symbols, so the dynamic linker never binds to it, and one that the
whole process sees can break a later `import torch`. So it is loaded for itself, and a library with
the three functions that libmlx calls (cpp/blas.cpp) is loaded for all, before mlx is.

Both sides speak the 32-bit-integer CBLAS interface. LAPACK stays with the wheel's own.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pippin.backends.host import num_threads
from pippin.backends.mlx.cpu.build import SOURCES, build

PRODUCTS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all the CBLAS that libmlx imports
PREFIXES = ("", "scipy_")
FLAGS = ("-O2", "-shared", "-fPIC")
# Between products OpenBLAS's threads spin for 2^n cycles before they sleep, by default 2^26: longer
# than a decode step. They then take the cores from mlx's own thread and from the host.
SPIN = "12"


@dataclass(frozen=True)
class BlasReport:
    """Who multiplies matrices on the CPU; `reason` says why it is not a fast library of ours."""

    name: str
    path: str | None = None
    threads: int | None = None
    reason: str | None = None

    @property
    def loaded(self) -> bool:
        return self.reason is None


@functools.cache
def load_fast_blas() -> BlasReport:
    """Make mlx's CPU products use OpenBLAS. Once per process, before the first product.

    `PIPPIN_BLAS=off` leaves mlx alone; `PIPPIN_BLAS=/path/to/libopenblas.so` names another library.
    """
    if platform.system() != "Linux":
        return BlasReport("system", reason="mlx uses the system's own fast BLAS here")
    choice = os.environ.get("PIPPIN_BLAS", "auto")
    if choice == "off":
        return BlasReport("bundled with mlx", reason="PIPPIN_BLAS=off")
    path = Path(choice) if choice != "auto" else _find_openblas()
    if path is None:
        reason = "scipy-openblas32 is not installed: pip install 'pippin[cpu]'"
        return BlasReport("bundled with mlx", reason=reason)
    try:
        return _load(path)
    except OSError as error:
        return BlasReport("bundled with mlx", path=str(path), reason=str(error))


def _find_openblas() -> Path | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    return path if path.exists() else None


def _load(path: Path) -> BlasReport:
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", SPIN)
    library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    prefix = next((p for p in PREFIXES if hasattr(library, p + PRODUCTS[0])), None)
    if prefix is None:
        raise OSError(f"{path} has no {PRODUCTS[0]}")
    # libmlx finds it, as it looks among what is loaded for all first.
    ours = ctypes.CDLL(str(build("blas", [SOURCES / "blas.cpp"], FLAGS, "")), os.RTLD_GLOBAL)
    for name in PRODUCTS:
        address = ctypes.cast(library[prefix + name], ctypes.c_void_p)
        ctypes.c_void_p.in_dll(ours, f"their_{name}").value = address.value
    threads = _set_threads(library, prefix)
    return BlasReport("OpenBLAS", path=str(path), threads=threads)


def _set_threads(library: ctypes.CDLL, prefix: str) -> int | None:
    """As many as `num_threads`, unless the environment says otherwise."""
    if not hasattr(library, f"{prefix}openblas_set_num_threads"):
        return None
    if not any(os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")):
        library[f"{prefix}openblas_set_num_threads"](num_threads())
    get_threads: Callable[[], int] = library[f"{prefix}openblas_get_num_threads"]
    return get_threads()
