"""Layouts of made-up attention layers, whose rows are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.types import Component


def kv_layout(
    windows: Sequence[int | None], heads: int, dims: tuple[int, int], dtype: mx.Dtype = mx.float32
) -> Layout:
    """A layer for each of `windows`, in pieces; `dims`: of keys and of values."""
    shapes = tuple((heads, dim) for dim in dims)
    caches = [
        LayerCache(
            layer,
            Component.ATTENTION if window is None else Component.WINDOW,
            window,
            shapes,
            (dtype, dtype),
            Reads.PIECES,
        )
        for layer, window in enumerate(windows)
    ]
    return Layout(tuple(caches), (0,) * len(caches))
