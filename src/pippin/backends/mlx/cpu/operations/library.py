"""Builds, tries and loads the operations, once for the CPU and the mlx at hand. Knows no model.

mlx's own way in is an extension module, built with Python's headers and the nanobind that mlx was
built with: few machines have both. These are built with g++ and the headers in mlx's wheel alone,
and arrays are passed by address:

    Python's mx.array  ->  the C++ array inside of the object  ->  a node of ours in a blank array

Where it lies inside is nanobind's business, so everything is tried first, in a process that may
crash (check.py). What came of it is remembered beside the library: an operation that crashes or
computes something else is left out by name. mlx's own are used instead of it, and of all of them
where the library does not fit or there is no compiler. What could not be compiled is tried again by
the next process, which may have more memory or disk.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from platformdirs import user_cache_path

from pippin.backends.mlx.cpu.blas import libmlx_path

SOURCE = Path(__file__).parent / "cpp" / "library.cpp"
FLAGS = (
    # The last: what is static in a header belongs to one library, not to the process.
    *("-O3", "-march=native", "-std=c++20", "-shared", "-fPIC", "-fno-gnu-unique"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
BUILD_SECONDS, CHECK_SECONDS = 300, 120
CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")
DOES_NOT_FIT = 3  # check.py's exit status where arrays are not found; no traceback has it
# Ends of a process that the code in it brought about, and no lack of memory or user.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class OperationsReport:
    """The library's file, or why there is none."""

    path: Path | None = None
    reason: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # why, by operation


@functools.cache
def find_library() -> OperationsReport:
    """The first call on a machine builds it, which takes some seconds."""
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
        left_out = _tried(library)
        if left_out is None:
            left_out = _build(compiler, library, refusal)
    except (OSError, subprocess.SubprocessError) as error:
        return OperationsReport(reason=str(error))
    return OperationsReport(library, left_out=left_out)


def compile_command(compiler: str, library: Path) -> list[str]:
    mlx_home = libmlx_path().parent.parent.resolve()  # links to one mlx are one mlx
    includes = (f"-I{mlx_home / 'include'}",)
    links = (f"-L{mlx_home / 'lib'}", "-lmlx", f"-Wl,-rpath,{mlx_home / 'lib'}")
    return [compiler, *FLAGS, *includes, str(SOURCE), "-o", str(library), *links]


def _path(compiler: Path) -> Path:
    """Named by all that decides whether a library fits, which the source's own place does not."""
    files = [
        *sorted(SOURCE.parent.glob("*.[ch]*")),
        *sorted(Path(__file__).parent.glob("check*.py")),
    ]
    sources = [path.read_bytes() for path in files]
    command = [word for word in compile_command(str(compiler), SOURCE) if word != str(SOURCE)]
    version = _run([str(compiler), "--version"], BUILD_SECONDS)
    libmlx = libmlx_path().stat()
    mlx = (importlib.metadata.version("mlx"), libmlx.st_size, libmlx.st_mtime_ns)
    facts = (sources, command, version, mlx, sys.version, _cpu())
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
    return user_cache_path("pippin") / "kernels" / f"operations-{name}.so"


def _cpu() -> list[str]:
    """What names the CPU: a home may be shared by machines."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # containers may hide it
        first = []
    return [platform.machine(), *(line for line in first if line.startswith(CPU_FACTS))]


def _tried(library: Path) -> dict[str, str] | None:
    """What was left out when it was tried; None: it was not, or that cannot be read any more."""
    if not library.exists():
        return None
    try:
        return msgspec.json.decode(_notes(library).read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _notes(library: Path) -> Path:
    return library.with_suffix(".json")


def _build(compiler: str, library: Path, refusal: Path) -> dict[str, str]:
    """Under another name until it was tried: a library that is there is one that works."""
    library.parent.mkdir(parents=True, exist_ok=True)
    own = library.with_name(f"{library.name}.{os.getpid()}")
    own_notes = _notes(own)
    try:
        _run(compile_command(compiler, own), BUILD_SECONDS)
        left_out = try_operations(own)
        own_notes.write_bytes(msgspec.json.encode(left_out))
        own_notes.replace(_notes(library))
        own.replace(library)
    except Failed as failure:
        if failure.is_for_good:
            refusal.write_text(str(failure))
        raise
    finally:
        own.unlink(missing_ok=True)
        own_notes.unlink(missing_ok=True)
    return left_out


def try_operations(library: Path) -> dict[str, str]:
    """Why each operation that does not work here does not. One that crashes ends the process that
    tried it: the rest is tried by another."""
    module = "pippin.backends.mlx.cpu.operations.check"
    left_out: dict[str, str] = {}
    while True:
        command = [sys.executable, "-m", module, str(library), *left_out]
        try:
            printed = _run(command, CHECK_SECONDS)
        except Failed as failure:
            last = failure.printed.splitlines()[-1:]
            if failure.crash is None or not last or not last[0].startswith("try "):
                raise
            left_out[last[0].removeprefix("try ")] = f"it crashed ({failure.crash})"
            continue
        lines = [line.split(" ", 1) for line in printed.splitlines()]
        off = [text.split(": ", 1) for verdict, text in lines if verdict == "off"]
        return left_out | dict(off)


class Failed(OSError):
    def __init__(self, command: list[str], status: int, printed: str, errors: str) -> None:
        lines = errors.strip().splitlines() or [f"ended with {status}"]
        said = next((line for line in lines if "error: " in line), lines[-1])
        super().__init__(f"{Path(command[0]).name}: {said}")
        self.printed = printed
        died_of = signal.Signals(-status) if -status in signal.valid_signals() else None
        self.crash = died_of.name if died_of in CRASHES else None
        self.is_for_good = status == DOES_NOT_FIT or self.crash is not None


def _run(command: list[str], seconds: float) -> str:
    """What it prints."""
    english = os.environ | {"LC_ALL": "C"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=english)
    if ran.returncode:
        raise Failed(command, ran.returncode, ran.stdout, ran.stderr)
    return ran.stdout
