"""Tests side by side keep out of each other's way, and leave nothing in the user's cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

if (worker := os.environ.get("PYTEST_XDIST_WORKER")) is not None:
    # mlx builds kernels in the temporary directory and would load one that is half written.
    directory = Path(tempfile.gettempdir(), f"pippin-tests-{worker}")
    directory.mkdir(exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory)
    # Workers that each use every core stand in each other's way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def cache_dir_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
