"""Compiles C++ of ours with g++, once for a machine. Imports no mlx."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from platformdirs import user_cache_path

SOURCES = Path(__file__).parent / "cpp"
BUILD_SECONDS = 300
CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")


def build(name: str, sources: Sequence[Path], flags: Sequence[str], facts: object) -> Path:
    """A shared library, or an OSError that says why there is none. It is named by all that decides
    whether it fits, `facts` among it, but not by the place of our sources."""
    ours = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    digest = hashlib.sha256(repr((ours, flags, _cpu(), facts)).encode()).hexdigest()[:12]
    library = user_cache_path("pippin") / "kernels" / f"{name}-{digest}.so"
    if not library.exists():
        compiler = shutil.which("g++")
        if compiler is None:
            raise OSError("no g++ on PATH")
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_name(f"{library.name}.{os.getpid()}")
        try:
            _run([compiler, *map(str, sources), *flags, "-o", str(unfinished)])
            unfinished.replace(library)
        finally:
            unfinished.unlink(missing_ok=True)
    return library


def _cpu() -> list[str]:
    """What names the CPU: a home may be shared by machines."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # containers may hide it
        first = []
    return [platform.machine(), *(line for line in first if line.startswith(CPU_FACTS))]


def _run(command: Sequence[str]) -> None:
    english = os.environ | {"LC_ALL": "C"}
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=BUILD_SECONDS, env=english
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"g++ was stopped after {BUILD_SECONDS} s") from error
    if ran.returncode:
        lines = ran.stderr.strip().splitlines() or [f"ended with {ran.returncode}"]
        raise OSError(f"g++: {next((line for line in lines if 'error: ' in line), lines[-1])}")
