from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest

from pippin.backends.mlx.cpu.operations import find_operations
from pippin.backends.mlx.device import on_cpu


@pytest.fixture
def ours() -> Any:
    """Where they can be built they must work: a refusal is a failure, not a skip."""
    if sys.platform != "linux" or shutil.which("g++") is None or not on_cpu():
        pytest.skip("no g++, or not a Linux CPU: mlx's own operations are used")
    found = find_operations()
    assert found.module is not None, found.reason
    return found.module
