"""Which kernel attends over packed rows of a model's layers. Knows no rows."""

from __future__ import annotations

from pippin.backends.mlx.attention.paths import AttendPacked
from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.gpu import latent_attention, packed_attention
from pippin.backends.mlx.layout import Layout


def kernel_of(layout: Layout) -> AttendPacked | None:
    """On Metal; None elsewhere, and where there is none for each of these layers."""
    if not on_metal() or not layout.packs_rows:
        return None
    caches = [layout.caches[index] for index in layout.kv_indices]
    if layout.has_latents:
        return latent_attention.attend_latents if all(map(latent_attention.takes, caches)) else None
    return packed_attention.attend_packed if all(map(packed_attention.takes, caches)) else None
