"""NVIDIA's run-time compiler, the one that mlx has brought into this process. Knows no kernels."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

MAPS = Path("/proc/self/maps")  # the libraries of this process, where a system tells them
OPTIONS = ("--device-as-default-execution-space",)  # as mlx has it

_SIGNATURES = {
    "nvrtcCreateProgram": [
        *(ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p, ctypes.c_char_p),
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
    ],
    "nvrtcCompileProgram": [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    "nvrtcGetProgramLogSize": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)],
    "nvrtcGetProgramLog": [ctypes.c_void_p, ctypes.c_char_p],
    "nvrtcGetCUBINSize": [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)],
    "nvrtcGetCUBIN": [ctypes.c_void_p, ctypes.c_char_p],
    "nvrtcDestroyProgram": [ctypes.POINTER(ctypes.c_void_p)],
}


class CannotCompile(Exception):
    pass


class Compiler:
    """CUDA C++ without headers to machine code."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def compile(self, source: str, architecture: str) -> bytes:
        """`architecture` is the device's, like sm_90a."""
        options = [f"--gpu-architecture={architecture}".encode(), *map(str.encode, OPTIONS)]
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", program, source.encode(), b"pippin.cu", 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*options)
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            if status != 0:
                log = self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()
                raise CannotCompile(log.strip() or self._error(status))
            return self._read(program, "nvrtcGetCUBIN")
        finally:
            self._call("nvrtcDestroyProgram", program)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, size)
        found = ctypes.create_string_buffer(size.value)
        self._call(what, program, found)
        return found.raw

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CannotCompile(f"{name}: {self._error(status)}")

    def _error(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


@cache
def loaded_compiler() -> Compiler:
    """No other than mlx's: what it compiles is for the same driver."""
    try:
        paths = {line.split(maxsplit=5)[-1].strip() for line in MAPS.read_text().splitlines()}
        library = next(path for path in paths if Path(path).name.startswith("libnvrtc.so"))
        return Compiler(library)
    except StopIteration:
        raise CannotCompile("there is no libnvrtc in this process") from None
    except (OSError, AttributeError) as error:
        raise CannotCompile(str(error)) from error
