"""Whether mx.compile works, found out before a model needs it; each case in a fresh process."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from processes import run_python

linux_only = pytest.mark.skipif(
    platform.system() != "Linux", reason="mx.compile calls g++ only on Linux CPUs"
)


@pytest.fixture(autouse=True)
def compile_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)


@linux_only
def test_without_a_compiler_mlx_runs_functions_uncompiled() -> None:
    code = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from pippin.backends.mlx.cpu.compiler import disable_compile_unless_available
print(disable_compile_unless_available().reason)
assert mx.compile(lambda x: mx.exp(x) * 3 - 1)(mx.zeros(2)).tolist() == [2.0, 2.0]
"""
    assert run_python(code, PATH="/nonexistent") == "no g++ on PATH"


@linux_only
def test_a_compiler_that_fails_is_found_out_before_a_model_needs_it(tmp_path: Path) -> None:
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no headers here\nexit 1\n')
    fake.chmod(0o755)
    code = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from pippin.backends.mlx.cpu.compiler import disable_compile_unless_available
print(disable_compile_unless_available().available)
assert mx.compile(lambda x: mx.exp(x) * 3 - 1)(mx.zeros(2)).tolist() == [2.0, 2.0]
"""
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    assert run_python(code, **env) == "False"


@linux_only
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_another_users_kernels_turn_compilation_off(tmp_path: Path) -> None:
    code = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
from pathlib import Path
from pippin.backends.mlx.cpu.compiler import compile_available
kernels = Path("{root}", "mlx", mx.__version__, "cpu")
kernels.mkdir(parents=True)
kernels.chmod(0o555)
print(compile_available().reason)
"""
    assert "another user" in run_python(code.format(root=tmp_path), TMPDIR=str(tmp_path))
