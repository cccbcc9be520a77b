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
def load_torch(name: str) -> LoadedModel:
    """In float32 on every device: half precision would leave too many tokens on a level."""
    return load(BUNDLED_PATH if name == BUNDLED else checkpoint(name), dtype="float32")


def make_torch_backend(name: str, *, num_slots: int, pool_bytes: int = AMPLE_BYTES) -> TorchBackend:
    return TorchBackend(
        load_torch(name),
        num_slots=num_slots,
        pool_bytes=pool_bytes,
        fingerprints=True,
        debug=True,
    )
