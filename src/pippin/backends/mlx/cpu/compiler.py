"""Whether `mx.compile` works here, and where it keeps kernels. Knows no models.

On a Linux CPU it calls g++ at run time; on GPUs kernels come without one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from pippin.backends.mlx.device import on_cpu
from pippin.native_kernels import FLAGS, are_native


def kernel_dir() -> Path:
    """Where mlx keeps the kernels that it builds for CPUs."""
    directory = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return Path(directory, "mlx", importlib.metadata.version("mlx"), "cpu")


@dataclass(frozen=True)
class CompileReport:
    available: bool
    reason: str


@functools.cache
def compile_available() -> CompileReport:
    """Found out by trying, once."""
    if platform.system() != "Linux" or not on_cpu():
        return CompileReport(True, "kernels are built for the GPU")
    if shutil.which("g++") is None:
        return CompileReport(False, "no g++ on PATH")
    kernels = kernel_dir()
    if kernels.exists() and not os.access(kernels, os.W_OK):
        return CompileReport(False, f"{kernels} belongs to another user")
    try:
        mx.eval(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.zeros(1)))
    except RuntimeError as error:  # g++ without headers, a temporary directory that is read-only
        return CompileReport(False, str(error).strip().splitlines()[-1])
    return CompileReport(True, f"g++ {FLAGS}" if are_native() else "g++")


def disable_compile_unless_available() -> CompileReport:
    """Call once at load: without a working compiler, models run their functions uncompiled."""
    report = compile_available()
    if not report.available:
        mx.disable_compile()
    return report
