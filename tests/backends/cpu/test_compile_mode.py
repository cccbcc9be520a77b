"""Functions are compiled on Linux CPUs without a C++ compiler; each case in a fresh process."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from processes import run_python

pytestmark = pytest.mark.skipif(
    platform.system() != "Linux", reason="mx.compile calls g++ only on Linux CPUs"
)

CODE = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from pippin.backends.mlx.cpu import compile_mode
{change}
calls = []
def function(x):
    calls.append(1)
    return mx.exp(x) * 3 - 1
print(compile_mode.compile_without_fusing())
compiled = mx.compile(function)
assert [compiled(mx.zeros(2)).tolist() for _ in range(3)] == 3 * [[2.0, 2.0]]
print(len(calls))
"""


def test_a_graph_is_kept_and_nothing_is_compiled(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nexit 1\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    assert run_python(CODE.format(change=""), **env).split() == ["True", "1"]


@pytest.mark.parametrize("change", ["", "compile_mode.SET_MODE = 'no_such_function'"])
def test_without_a_compiler_or_compile_modes_functions_run_uncompiled(change: str) -> None:
    found = run_python(CODE.format(change=change), PATH="/nonexistent")
    assert found.split() == ["False", "3"]
