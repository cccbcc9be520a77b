"""Kernels for the CPU at hand, in processes of our own. Knows no mlx, only how it calls g++.

On a Linux CPU `mx.compile` writes C++ to the temporary directory and runs `g++ -O3`, which names no
CPU: on x86-64 a kernel then takes four numbers at a time, as any such CPU can, where this one may
take eight or sixteen. So `g++` becomes a script that adds -march=native, first on PATH, and the
temporary directory one in the user's cache. There nobody else loads the kernels, and they outlast a
restart of the machine. Servers that start together build the same files, and mlx has no lock: the
script compiles a copy of the source, again if that was not all of it, and a library comes whole.

A process inherits both. They change what else it might run, so only the `pippin` command asks for
them: a program that imports Pippin keeps its environment and mlx's own kernels.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

FLAGS = "-march=native"
DIRECTORY = "PIPPIN_NATIVE_KERNELS"  # in the environment of processes that build such kernels
SCRIPT = r"""#!/bin/sh
source= built= before=
for word; do
    case "$word" in *.cpp) source=$word ;; esac
    [ "$before" = -o ] && built=$word
    before=$word
done
build() { "$COMPILER" $FLAGS "$@" || "$COMPILER" "$@"; }
if [ -z "$source" ] || [ -z "$built" ]; then build "$@"; exit; fi

own=$built.$$
trap 'rm -f "$own" "$own.cpp"' EXIT
for word; do
    shift
    case "$word" in "$source") word=$own.cpp ;; "$built") word=$own ;; esac
    set -- "$@" "$word"
done
cp "$source" "$own.cpp" || exit
while :; do
    build "$@" && status=0 || status=$?
    [ "$(cksum < "$source")" = "$(cksum < "$own.cpp")" ] && break
    cp "$source" "$own.cpp" || exit  # another process was still writing it
done
[ $status = 0 ] && mv "$own" "$built"
exit $status
"""
CPU_FACTS = ("model name", "flags", "CPU implementer", "CPU part", "Features")

logger = logging.getLogger(__name__)


def build_for_this_cpu() -> None:
    """From now on, in this process and those that it starts."""
    if platform.system() != "Linux" or are_native():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        return
    home = user_cache_path("pippin") / "kernels" / cpu_identity(Path(compiler))
    script = home / "bin" / "g++"
    try:
        write_script(script, compiler)
    except OSError as error:
        logger.warning("kernels are built for any CPU: %s", error)
        return
    if not os.access(script, os.X_OK):
        logger.warning("kernels are built for any CPU: nothing may be run from %s", home)
        return
    tempfile.gettempdir()  # settles it: other files of this process stay out of there
    os.environ["TMPDIR"] = os.environ[DIRECTORY] = str(home)
    others = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([str(script.parent), others])


def are_native() -> bool:
    """Whether kernels that this process builds are for this CPU."""
    return DIRECTORY in os.environ


def cpu_identity(compiler: Path) -> str:
    """Names what is built here: a home may be shared by machines, and a compiler replaced."""
    built = compiler.stat()
    facts = [SCRIPT, FLAGS, platform.machine(), str(compiler), built.st_size, built.st_mtime_ns]
    try:
        first_cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:  # containers may hide it
        first_cpu = []
    facts += [line for line in first_cpu if line.startswith(CPU_FACTS)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def write_script(path: Path, compiler: str, flags: str = FLAGS) -> None:
    """A compiler that does not know the flags still builds."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f"{path.name}-{os.getpid()}")
    whole.write_text(SCRIPT.replace("$COMPILER", compiler).replace("$FLAGS", flags))
    whole.chmod(0o755)
    whole.replace(path)  # other processes see all of it or nothing
