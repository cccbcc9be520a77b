"""Compiles generated Metal source with clang for this CPU. Runs nothing and knows no arrays.

A library is kept under the digest of all that it is made from: the next run finds it.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from metal.generated_source import GeneratedSource, KernelFault, Parameter
from processes import BUILT

CLANG = (shutil.which("clang++") or shutil.which("clang")) if sys.platform == "linux" else None
HERE = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fno-builtin", "-ffp-contract=off", "-w"]
CHECKS = [
    "-fsanitize=thread,array-bounds,alignment,shift,integer-divide-by-zero",
    *("-fno-vectorize", "-fno-slp-vectorize"),  # or accesses are wider than the checks know
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write"),
]
# `threadgroup float a[2], b;` declares; `threadgroup float* a` points.
THREADGROUP_VARIABLE = re.compile(r"\bthreadgroup\s+(?=[\w:<>, ]+?\s\w+\s*[\[;,=])")
ADDRESS_SPACE = re.compile(r"\b(?:threadgroup|device|thread)\b(?!_)")
ATTRIBUTE = re.compile(r"\[\[.*?\]\]")
IN_THREADGROUP_MEMORY = 'static __attribute__((section("threadgroup_memory"), used)) '
XYZ = "thread->{0}[0], thread->{0}[1], thread->{0}[2]"
ATTRIBUTES = {
    "thread_position_in_grid": XYZ.format("in_grid"),
    "thread_position_in_threadgroup": XYZ.format("in_group"),
    "threadgroup_position_in_grid": XYZ.format("group_in_grid"),
    "threads_per_threadgroup": XYZ.format("group_size"),
    "dispatch_threads_per_threadgroup": ", ".join(f"launch->group[{i}]" for i in range(3)),
    "threads_per_grid": ", ".join(f"launch->grid[{i}]" for i in range(3)),
    "threadgroups_per_grid": ", ".join(
        f"(launch->grid[{i}] + launch->group[{i}] - 1) / launch->group[{i}]" for i in range(3)
    ),
    "thread_index_in_threadgroup": "thread->index",
    "thread_index_in_simdgroup": "thread->index % LANES",
    "simdgroup_index_in_threadgroup": "thread->index / LANES",
    "threads_per_simdgroup": "LANES",
    "thread_execution_width": "LANES",
    "simdgroups_per_threadgroup": "(num_group_threads() + LANES - 1) / LANES",
}


class CompileError(KernelFault):
    """clang refuses the kernel."""


def _clang(*arguments: str | Path) -> str:
    assert CLANG is not None
    done = subprocess.run([CLANG, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stdout


@cache
def _machine() -> str:
    """Digest of what every kernel is compiled with."""
    folders = (HERE / "machine", HERE / "shim")
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    made_with = [_clang("--version"), *(path.read_text() for path in [*files, Path(__file__)])]
    return hashlib.sha256("\0".join(made_with).encode()).hexdigest()


@cache
def _machine_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="metal-emulator-")


@cache
def _machine_objects() -> list[Path]:
    objects = []
    for name in ("threads", "memory"):
        objects.append(Path(_machine_folder().name, f"{name}.o"))
        _clang(*FLAGS, "-O2", "-c", HERE / "machine" / f"{name}.cpp", "-o", objects[-1])
    return objects


def rewrite(preprocessed: str) -> str:
    """C++ of Metal: variables in threadgroup memory get a section, other address spaces go."""
    text = THREADGROUP_VARIABLE.sub(IN_THREADGROUP_MEMORY, preprocessed)
    text = re.sub(r"\bconstant\b", "const", ADDRESS_SPACE.sub("", text))
    return ATTRIBUTE.sub("", text)


def _argument(parameter: Parameter, number: int) -> str:
    if parameter.attribute != "buffer":
        value = ATTRIBUTES.get(parameter.attribute)
        if value is None:
            raise CompileError(f"the emulator does not know the attribute {parameter.attribute}")
        return f"{parameter.type}{{{value}}}"
    plain = re.sub(r"\b(device|constant)\b", "", parameter.type)
    if plain.endswith("&"):
        return f"*reinterpret_cast<{plain[:-1]}*>(buffers[{number}])"
    return f"reinterpret_cast<{plain}>(buffers[{number}])"


@cache
def compile_kernel(source: GeneratedSource) -> ctypes.CDLL:
    """Metal's own compiler also distinguishes address spaces."""
    digest = hashlib.sha256(f"{_machine()} {source}".encode()).hexdigest()
    library = BUILT / "metal" / f"{digest}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            _build(source, Path(folder)).replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.metal_threadgroup_bytes.restype = ctypes.c_uint64
    loaded.metal_launch.restype = None
    return loaded


def _build(source: GeneratedSource, folder: Path) -> Path:
    metal, cpp = folder / "kernel.metal", folder / "kernel.cpp"
    metal.write_text(source.text)
    plain = rewrite(_clang("-E", "-x", "c++", "-I", HERE / "shim" / "empty", metal))
    arguments = ", ".join(map(_argument, source.parameters, range(len(source.parameters))))
    cpp.write_text(
        f'#include "{HERE}/shim/metal_shim.h"\n{plain}\n'
        'extern "C" QUIET void metal_entry(char* const* buffers, const Thread* thread) {\n'
        f"  {source.call}({arguments});\n}}\n"
    )
    kernel, library = folder / "kernel.o", folder / "kernel.so"
    _clang(*FLAGS, *CHECKS, "-c", cpp, "-o", kernel)
    _clang("-shared", "-Wl,-Bsymbolic", kernel, *_machine_objects(), "-lm", "-o", library)
    return library
