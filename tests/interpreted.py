"""Triton's kernels in tests: on a GPU as they are, on a CPU by its interpreter (conftest.py).

`pytest.importorskip("interpreted")` skips a module whose kernels nothing here can run.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")
triton = pytest.importorskip("triton", reason="triton is not installed: torch for GPUs brings it")

INTERPRETS = (3, 9)  # earlier interpreters do not run with numpy 2.4

if not torch.cuda.is_available():
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < INTERPRETS:
        pytest.skip(f"triton {triton.__version__} interprets nothing", allow_module_level=True)
