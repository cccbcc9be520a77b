"""Keys and values of rows that verify drafts, into their cells. Attends to nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.attention.step import normed_heads
from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.step.decode_inputs import Inputs


@triton.jit
def _write_keys(
    qkv,
    k_norm,
    cos_table,
    sin_table,
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
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row, kv_head = tl.program_id(0), tl.program_id(1)
    half: tl.constexpr = ROTATED // 2
    position = tl.load(positions + row)
    i = tl.arange(0, D)
    rotates = i < ROTATED
    partner = tl.where(rotates, tl.where(i < half, i + half, i - half), i)
    turn = position.to(tl.int64) * half + tl.where(i < half, i, i - half)
    cos = tl.load(cos_table + turn, mask=rotates, other=1.0)
    sin = tl.load(sin_table + turn, mask=rotates, other=0.0)
    keys = qkv + row.to(tl.int64) * row_stride + HEADS * D * (2 if GATED else 1) + kv_head * D
    k = normed_heads(keys, k_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
    v = tl.load(keys + KV_HEADS * D + i)
    new = kv + kv_head * D + tl.load(cells + row).to(tl.int64) * kv_stride + i
    tl.store(new, k.to(kv.dtype.element_ty))
    tl.store(new + KV_HEADS * D, v.to(kv.dtype.element_ty))


def write_keys(
    qkv: torch.Tensor,  # [tokens, ..], as for `attention_step`
    layer: AttentionLayer,
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool
    inputs: Inputs,
) -> None:
    """Keys and values of several tokens of a row, of which the later see the earlier: before
    `attention_step`, which writes each of them once more."""
    norm = layer.head_norms[1] if layer.head_norms else None
    _write_keys[(qkv.shape[0], layer.shape.num_kv_heads)](
        qkv,
        norm.weight if norm else None,
        layer.rope.cos,
        layer.rope.sin,
        kv,
        inputs.position,
        inputs.cell,
        qkv.stride(0),
        kv.stride(0),
        norm.eps if norm else 0.0,
        HEADS=layer.shape.num_heads,
        KV_HEADS=layer.shape.num_kv_heads,
        GATED=layer.shape.gated,
        NORM=norm is not None,
        D=layer.shape.head_dim,
        ROTATED=layer.rope.dim,
        num_warps=1,
        **dependent(qkv.device),
    )
