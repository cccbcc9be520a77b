"""Flips one bit of a payload, where it lies: what a stray write or a bad memory chip does."""

from __future__ import annotations

from typing import Any

from pippin.backends.fake import FakePayload


def damage(payload: Any) -> None:
    """Of its first token, whichever backend made it."""
    if isinstance(payload, FakePayload):
        assert payload.content is not None
        payload.content = [payload.content[0] ^ 1, *payload.content[1:]]
    elif type(payload).__module__.startswith("pippin.backends.mlx"):
        _damage_mlx(payload)
    else:
        _damage_torch(payload)


def _damage_mlx(payload: Any) -> None:
    """Arrays are values: another one takes the place of the first."""
    import mlx.core as mx
    import numpy as np

    owner = payload.spans[0].block if hasattr(payload, "spans") else payload
    first, *others = owner.arrays
    content = np.array(mx.contiguous(first).view(mx.uint8))
    content.reshape(-1)[0] ^= 1
    owner.arrays = (mx.array(content).view(first.dtype), *others)


def _damage_torch(payload: Any) -> None:
    import torch

    with torch.inference_mode():
        if hasattr(payload, "hidden"):
            payload.hidden = payload.hidden.clone()
            payload.hidden.view(torch.uint8)[0] ^= 1
        elif hasattr(payload, "slab"):
            payload._pools.state_bytes(payload.slab)[0] ^= 1
        else:
            payload._pools._cells(payload.kind)[int(payload.cells[0]), 0] ^= 1
