"""Fast matrix products on Linux CPUs. Knows no models.

mlx's Linux wheel links the reference BLAS, some fifty times slower than OpenBLAS. PyPI's OpenBLAS
(`scipy-openblas32`) prefixes its symbols, so the dynamic linker never binds to it. Editing the
library on disk or exporting it to the whole process has a price: an OpenBLAS that everyone sees
can break a later `import torch`. So `load_fast_blas` redirects libmlx's own calls and nothing
else: it writes OpenBLAS's addresses into the slots of libmlx's global offset table.

    libmlx: call cblas_sgemm  ->  slot in libmlx's table  ->  OpenBLAS      (was: reference BLAS)

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
from pippin.backends.mlx.cpu.elf import imported_slots, load_address, write_slot

REDIRECTED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # all the CBLAS that libmlx imports
PREFIXES = ("", "scipy_")
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
        return _redirect(path)
    except OSError as error:
        return BlasReport("bundled with mlx", path=str(path), reason=str(error))


def _find_openblas() -> Path | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    return path if path.exists() else None


def _redirect(path: Path) -> BlasReport:
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", SPIN)
    library = ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
    prefix = next((p for p in PREFIXES if hasattr(library, p + REDIRECTED[0])), None)
    if prefix is None:
        raise OSError(f"{path} has no {REDIRECTED[0]}")
    slots = imported_slots(libmlx_path(), REDIRECTED)
    if not slots:
        raise OSError("libmlx imports no CBLAS")
    for symbol, address in slots.items():
        write_slot(address, load_address(library, prefix + symbol))
    threads = _set_threads(library, prefix)
    return BlasReport("OpenBLAS", path=str(path), threads=threads)


def libmlx_path() -> Path:
    import mlx.core  # loads libmlx.so, whose table is about to be edited

    return Path(mlx.core.__file__).parent / "lib" / "libmlx.so"


def _set_threads(library: ctypes.CDLL, prefix: str) -> int | None:
    """As many as `num_threads`, unless the environment says otherwise."""
    if not hasattr(library, f"{prefix}openblas_set_num_threads"):
        return None
    if not any(os.environ.get(name) for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")):
        library[f"{prefix}openblas_set_num_threads"](num_threads())
    get_threads: Callable[[], int] = library[f"{prefix}openblas_get_num_threads"]
    return get_threads()
