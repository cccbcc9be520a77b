"""The checkpoint that ships with Pippin, loaded once for all tests of a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pippin

if TYPE_CHECKING:
    from pippin.backends.mlx.load import LoadedModel

BUNDLED_PATH = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"


def load_bundled() -> LoadedModel:
    """In float32 on every device: half precision would leave too many tokens on a level."""
    from pippin.backends.mlx.cpu.operations import operations

    return _load(with_operations=operations() is not None)


@cache
def _load(*, with_operations: bool) -> LoadedModel:
    """One that was loaded without operations stays without."""
    from pippin.backends.mlx.load import load  # tests of text need the path alone

    return load(BUNDLED_PATH, dtype="float32", mtp=True)
