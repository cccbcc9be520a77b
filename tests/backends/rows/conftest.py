from __future__ import annotations

from collections.abc import Iterator

import pytest

from pippin.backends.mlx.cpu.operations.calls import operations, without_operations


@pytest.fixture
def unlisted() -> Iterator[None]:
    """Rows as on devices without operations of ours: in as few cohorts as is worth it."""
    with without_operations():
        yield


@pytest.fixture(params=["listed", "unlisted"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways that cohorts are attended to."""
    if request.param == "unlisted":
        request.getfixturevalue("unlisted")
    elif operations() is None:
        pytest.skip("no operations of ours on this device: rows are not listed")
    return str(request.param)
