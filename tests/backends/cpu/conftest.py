from __future__ import annotations

import shutil
import sys

import pytest

from pippin.backends.mlx.cpu.operations.bindings import Operations, operations
from pippin.backends.mlx.cpu.operations.library import find_library
from pippin.backends.mlx.device import on_cpu


@pytest.fixture
def ours() -> Operations:
    """Where they can be built they must work: a refusal is a failure, not a skip."""
    if sys.platform != "linux" or shutil.which("g++") is None or not on_cpu():
        pytest.skip("no g++, or not a Linux CPU: mlx's own operations are used")
    found = operations()
    assert found is not None, find_library().reason
    return found
