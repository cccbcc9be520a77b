"""Kernels for the CPU at hand: in processes of our own, and nowhere else."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.cli import main
from pippin.native_kernels import DIRECTORY, FLAGS
from processes import environment, run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        platform.system() != "Linux" or shutil.which("g++") is None, reason="needs Linux and g++"
    ),
]

COMPILE = """
import os, tempfile
before = tempfile.gettempdir()
from pippin.native_kernels import are_native, build_for_this_cpu
build_for_this_cpu()
build_for_this_cpu()  # once more changes nothing
import mlx.core as mx
mx.set_default_device(mx.cpu)
assert mx.compile(lambda x: mx.exp(x) * 3 - 1)(mx.zeros(2)).tolist() == [2.0, 2.0]
assert tempfile.gettempdir() == before
print(are_native(), os.environ["PATH"].count("/pippin/kernels/"))
"""


def compiler_that_tells(directory: Path, also: str = "") -> str:
    """A g++ that writes down how it was called; its directory first on a PATH."""
    real = shutil.which("g++")
    script = directory / "g++"
    script.write_text(f'#!/bin/sh\necho "$@" >> {directory}/calls\n{also}\nexec {real} "$@"\n')
    script.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_kernels_are_built_for_this_cpu_and_kept_in_the_cache(tmp_path: Path) -> None:
    path = compiler_that_tells(tmp_path)
    assert run_python(COMPILE, PATH=path, XDG_CACHE_HOME=str(tmp_path)) == "True 1"
    built = [line for line in (tmp_path / "calls").read_text().splitlines() if "-shared" in line]
    assert built
    assert all(FLAGS in line for line in built)
    (home,) = (tmp_path / "pippin" / "kernels").iterdir()
    assert list((home / "mlx").rglob("*.so"))


def test_a_compiler_that_does_not_know_the_flag_still_builds(tmp_path: Path) -> None:
    refuses = f'case "$*" in *{FLAGS}*) exit 1;; esac'
    path = compiler_that_tells(tmp_path, refuses)
    assert run_python(COMPILE, PATH=path, XDG_CACHE_HOME=str(tmp_path)) == "True 1"


def script_around(compiler: str, tmp_path: Path) -> Path:
    """Our g++, with these lines of shell in the place of the real one."""
    directory = tmp_path / "real"
    directory.mkdir()
    real = directory / "g++"
    real.write_text(f"#!/bin/sh\n{compiler}\n")
    real.chmod(0o755)
    prepare = "from pippin.native_kernels import build_for_this_cpu as b; b(); print(1)"
    path = f"{directory}:{os.environ['PATH']}"
    assert run_python(prepare, PATH=path, XDG_CACHE_HOME=str(tmp_path)) == "1"
    (script,) = (tmp_path / "pippin" / "kernels").glob("*/bin/g++")
    return script


def test_a_source_that_another_process_is_still_writing_is_compiled_again(tmp_path: Path) -> None:
    """The compiler here copies its input; meanwhile the other process writes the rest of it."""
    source, built = tmp_path / "a kernel.cpp", tmp_path / "a kernel.so"
    source.write_text("half")
    script = script_around(f'cp "$4" "$6"; printf "half and half" > "{source}"', tmp_path)
    subprocess.run([script, "-O3", "-shared", source, "-o", built], check=True)
    assert built.read_text() == "half and half"
    assert {path.name for path in tmp_path.glob("a kernel*")} == {source.name, built.name}


def test_a_library_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    source, built = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text("all")
    not_yet = f'[ ! -e "{built}" ] && printf begun > "$6" && [ ! -e "{built}" ]'
    script = script_around(f'{not_yet} && cp "$4" "$6"', tmp_path)
    subprocess.run([script, "-O3", "-shared", source, "-o", built], check=True)
    assert built.read_text() == "all"


def test_an_error_of_the_compiler_is_an_error(tmp_path: Path) -> None:
    source, built = tmp_path / "kernel.cpp", tmp_path / "kernel.so"
    source.write_text("all")
    script = script_around("echo no such thing; exit 3", tmp_path)
    command = [script, "-O3", "-shared", source, "-o", built]
    failed = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (failed.returncode, built.exists()) == (3, False)
    assert "no such thing" in failed.stdout


def test_without_a_place_for_them_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert run_python(COMPILE, XDG_CACHE_HOME=str(tmp_path / "file")) == "False 0"


def test_the_command_asks_for_them_and_a_program_that_calls_it_does_not(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--no-such-option"])
    assert DIRECTORY not in os.environ
    command = [sys.executable, "-m", "pippin", "--version"]
    env = {**environment(), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run(command, env=env, check=True, capture_output=True)
    assert list((tmp_path / "pippin" / "kernels").glob("*/bin/g++"))
