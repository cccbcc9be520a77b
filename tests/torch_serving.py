"""Serves the small checkpoints of torch_families.py and transformers_families.py, and the bundled
model, on torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from builders import AMPLE_BYTES
from bundled import BUNDLED_PATH
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel, load
from reference import BUNDLED
from torch_families import checkpoint
from transformers_families import WRITTEN_CONFIGS, written_model


@cache
def load_torch(
    name: str,
    dtype: str = "float32",
    mtp: bool = False,
    draft: str | None = None,
    kernels: bool | None = None,
) -> LoadedModel:
    """In float32 where tokens are compared: half precision leaves too many on a level. `kernels`:
    as where they serve."""
    drafts = None if draft is None else path_of(draft)
    return load(path_of(name), dtype=dtype, mtp=mtp, draft=drafts, kernels=kernels)


def path_of(name: str) -> Path:
    if name == BUNDLED:
        return BUNDLED_PATH
    return written_model(name)[1] if name in WRITTEN_CONFIGS else checkpoint(name)


def make_torch_backend(
    name: str,
    *,
    num_slots: int,
    pool_bytes: int = AMPLE_BYTES,
    max_depth: int = 0,
    mtp: bool = False,
    draft: str | None = None,
) -> TorchBackend:
    """`draft`: the name of a draft model."""
    return TorchBackend(
        load_torch(name, mtp=mtp, draft=draft),
        num_slots=num_slots,
        pool_bytes=pool_bytes,
        fingerprints=True,
        max_depth=max_depth,
        debug=True,
    )
