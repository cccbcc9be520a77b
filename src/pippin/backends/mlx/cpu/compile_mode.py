"""`mx.compile` on Linux CPUs: graphs are kept, no kernels are fused. Knows no models.

There a fused kernel is C++ that mlx has g++ compile at run time, some forty of them for a model's
decode step. Our operations leave little to fuse: what a compiled step saves is the model's Python.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import shutil

import mlx.core as mx

from pippin.backends.mlx.cpu.blas import libmlx_path
from pippin.backends.mlx.device import on_cpu

SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"  # mlx::core::set_compile_mode
NO_FUSE = 2  # mlx/compile.h


@functools.cache
def compile_without_fusing() -> bool:
    """From now on, in this process. Whether functions can be compiled."""
    if platform.system() != "Linux" or not on_cpu():
        return True
    try:
        set_mode = ctypes.CDLL(str(libmlx_path()))[SET_MODE]
    except AttributeError:  # an mlx that has no such function
        mx.disable_compile()
        return False
    set_mode(NO_FUSE)
    return shutil.which("g++") is not None  # mlx looks for one, though none is called
