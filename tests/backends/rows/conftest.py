from __future__ import annotations

from collections.abc import Iterator

import pytest

from pippin.backends.mlx.cpu.operations import operations, without_operations


@pytest.fixture
def without_table() -> Iterator[None]:
    """Rows as on devices without operations of ours, in plain operations."""
    with without_operations():
        yield


@pytest.fixture
def table() -> None:
    if operations() is None:
        pytest.skip("no operations of ours on this device: rows have no KV table")


@pytest.fixture(params=["table", "without_table"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways that rows are attended to on a CPU."""
    request.getfixturevalue(request.param)
    return str(request.param)
