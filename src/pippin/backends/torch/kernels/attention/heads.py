"""Heads of several tokens before attention: norms and rotation, keys and values into their cells.
Attends to nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.attention.step import normed_heads
from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.mixers import AttentionLayer


@triton.jit
def _place_heads(
    qkv,
    q_norm,
    k_norm,
    cos_table,
    sin_table,
    queries,
    kv,
    positions,
    cells,
    row_stride,
    kv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    FIRST: tl.constexpr,  # HEADS: none of the queries
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + FIRST
    half: tl.constexpr = ROTATED // 2
    position = tl.load(positions + row)
    i = tl.arange(0, D)
    rotates = i < ROTATED
    partner = tl.where(rotates, tl.where(i < half, i + half, i - half), i)
    turn = position.to(tl.int64) * half + tl.where(i < half, i, i - half)
    cos = tl.load(cos_table + turn, mask=rotates, other=1.0)
    sin = tl.load(sin_table + turn, mask=rotates, other=0.0)
    x = qkv + row * row_stride
    if FIRST < HEADS:  # noqa: SIM102 (one is known when it is compiled)
        if head < HEADS:
            q = normed_heads(
                x + head * D, q_norm, i, partner, rotates, cos, sin, eps, half, NORM, D
            )
            tl.store(queries + (row * HEADS + head) * D + i, q.to(queries.dtype.element_ty))
    if head >= HEADS:
        kv_head = head - HEADS
        keys = x + HEADS * D * (2 if GATED else 1) + kv_head * D
        k = normed_heads(keys, k_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
        v = tl.load(keys + KV_HEADS * D + i)
        new = kv + kv_head * D + tl.load(cells + row).to(tl.int64) * kv_stride + i
        tl.store(new, k.to(kv.dtype.element_ty))
        tl.store(new + KV_HEADS * D, v.to(kv.dtype.element_ty))


def place_heads(
    qkv: torch.Tensor,  # [tokens, ..]: queries | gates, if there are any | keys | values
    layer: AttentionLayer,
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool
    positions: torch.Tensor,  # integers [tokens]
    cells: torch.Tensor,
) -> torch.Tensor:
    """[tokens, heads, channels]: queries. Keys and values go into the cells."""
    shape = layer.shape
    queries = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.head_dim)
    _place(qkv, layer, kv, positions, cells, queries)
    return queries


def place_keys(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """Keys and values alone: of several tokens of a row, of which the later see the earlier, before
    `attention_step`, which writes each of them once more."""
    _place(qkv, layer, kv, positions, cells, None)


def _place(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    queries: torch.Tensor | None,
) -> None:
    shape, norms = layer.shape, layer.head_norms or (None, None)
    first = shape.num_heads if queries is None else 0
    _place_heads[(qkv.shape[0], shape.num_heads + shape.num_kv_heads - first)](
        qkv,
        norms[0].weight if norms[0] else None,
        norms[1].weight if norms[1] else None,
        layer.rope.cos,
        layer.rope.sin,
        queries,
        kv,
        positions,
        cells,
        qkv.stride(0),
        kv.stride(0),
        norms[0].eps if norms[0] else 0.0,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        GATED=shape.gated,
        NORM=norms[0] is not None,
        D=shape.head_dim,
        ROTATED=layer.rope.dim,
        FIRST=first,
        num_warps=1,
        **dependent(qkv.device),
    )
