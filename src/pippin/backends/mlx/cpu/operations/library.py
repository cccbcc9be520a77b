"""Builds and loads the operations, once for the CPU and the mlx at hand. Knows nothing of them.

mlx's own way in is an extension module, built with Python's headers and the nanobind that mlx was
built with: few machines have both. These are built with g++ and the headers in mlx's wheel alone,
and arrays are handed over by address:

    Python's mx.array  ->  the C++ array inside of the object  ->  a node of ours in a blank array

Where it lies inside is nanobind's business, so it is tried first, in a process that may crash
(check.py), and what was tried is remembered beside the library. Where that fails, or there is no
compiler, mlx's own operations are used, always. `PIPPIN_OPERATIONS=off` leaves ours alone.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from pippin.backends.mlx.cpu.blas import libmlx_path
from pippin.native_kernels import cpu_identity

SOURCE = Path(__file__).with_name("library.cpp")
FLAGS = (
    # Without the last what is static in a header would be one for all libraries of the process.
    *("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fno-gnu-unique"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
BUILD_SECONDS, CHECK_SECONDS = 300, 120

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OperationsReport:
    """The library's file, or why there is none."""

    path: Path | None = None
    reason: str | None = None


@functools.cache
def find_library() -> OperationsReport:
    """The first call on a machine builds it, which takes some seconds."""
    if os.environ.get("PIPPIN_OPERATIONS") == "off":
        return OperationsReport(reason="PIPPIN_OPERATIONS=off")
    if platform.system() != "Linux":
        return OperationsReport(reason="they are for Linux")
    compiler = shutil.which("g++")
    if compiler is None:
        return OperationsReport(reason="no g++ on PATH")
    try:
        library = _path(Path(compiler))
        refusal = library.with_suffix(".refused")
        if refusal.exists():
            return OperationsReport(reason=f"{refusal.read_text()} (see {refusal})")
        if not library.exists():
            _build(compiler, library, refusal)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("mlx's own operations are used: %s", error)
        return OperationsReport(reason=str(error))
    return OperationsReport(library)


def compile_command(compiler: str, library: Path) -> list[str]:
    mlx_home = libmlx_path().parent.parent
    # Our own headers by name: the compiler may be a script that copies the source (native_kernels).
    includes = (f"-I{mlx_home / 'include'}", f"-I{SOURCE.parent}")
    links = (f"-L{mlx_home / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx_home / 'lib'}")
    return [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(library), *links]


def _path(compiler: Path) -> Path:
    """Named by all that decides whether a library fits."""
    sources = [path.read_bytes() for path in sorted(SOURCE.parent.glob("*.[ch]*"))]
    command = compile_command(str(compiler), SOURCE)
    facts = (sources, command, importlib.metadata.version("mlx"), sys.version)
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return user_cache_path("pippin") / "kernels" / cpu_identity(compiler) / f"operations-{name}.so"


def _build(compiler: str, library: Path, refusal: Path) -> None:
    """Under another name until it was tried: a library that is there is one that works. What does
    not fit is not tried again; what failed for another reason is, by the next process."""
    library.parent.mkdir(parents=True, exist_ok=True)
    own = library.with_name(f"{library.name}.{os.getpid()}")
    check = [sys.executable, "-m", "pippin.backends.mlx.cpu.operations.check", str(own)]
    try:
        _run(compile_command(compiler, own), BUILD_SECONDS)
        _run(check, CHECK_SECONDS)
        own.replace(library)
    except Failed as failure:
        if failure.status != TRACEBACK or failure.command != check:
            refusal.write_text(str(failure))
        raise
    finally:
        own.unlink(missing_ok=True)


TRACEBACK = 1  # Python's exit status


class Failed(OSError):
    def __init__(self, command: list[str], status: int, errors: str) -> None:
        last = errors.strip().splitlines()[-1:] or [f"ended with {status}"]
        super().__init__(f"{Path(command[0]).name}: {last[0]}")
        self.command = command
        self.status = status


def _run(command: list[str], seconds: float) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if ran.returncode:
        raise Failed(command, ran.returncode, ran.stderr)


def open_library(path: Path) -> ctypes.PyDLL:
    """Its functions make nodes and return, so they keep Python's lock."""
    return ctypes.PyDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)
