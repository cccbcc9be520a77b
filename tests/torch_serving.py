"""Serves the small checkpoints of torch_families.py, and the bundled model, on torch."""

from __future__ import annotations

from functools import cache

from builders import AMPLE_BYTES
from bundled import BUNDLED_PATH
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel, load
from reference import BUNDLED
from torch_families import checkpoint


@cache
def load_torch(name: str, dtype: str = "float32", mtp: bool = False) -> LoadedModel:
    """In float32 where tokens are compared: half precision leaves too many on a level."""
    return load(BUNDLED_PATH if name == BUNDLED else checkpoint(name), dtype=dtype, mtp=mtp)


def make_torch_backend(
    name: str,
    *,
    num_slots: int,
    pool_bytes: int = AMPLE_BYTES,
    max_depth: int = 0,
    mtp: bool = False,
) -> TorchBackend:
    return TorchBackend(
        load_torch(name, mtp=mtp),
        num_slots=num_slots,
        pool_bytes=pool_bytes,
        fingerprints=True,
        max_depth=max_depth,
        debug=True,
    )
