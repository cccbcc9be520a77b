"""Cuts token axes into blocks and multiplies gates inside them; knows no recurrence.

Shared by the blocked recurrences. Arrays come in as [B, T, H, ...] and leave as
[B, N, G, H / G, C, ...]: N blocks of C tokens, heads in G groups that share keys.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

BLOCK_TOKENS = 64
_MIN_BLOCK_TOKENS = 16
_FAINT = 2.0**-36


def block_tokens(num_tokens: int) -> int:
    """Tokens per block: 64, or the least power of two from 16 that holds a short call."""
    block = _MIN_BLOCK_TOKENS
    while block < min(num_tokens, BLOCK_TOKENS):
        block *= 2
    return block


def split_blocks(x: mx.array, num_groups: int, fill: float = 0.0) -> mx.array:
    """[B, T, H, ...] -> contiguous float32 [B, N, G, H / G, C, ...], padded with `fill`."""
    batch, num_tokens, num_heads, *tail = x.shape
    block = block_tokens(num_tokens)
    x = x.astype(mx.float32)
    if num_tokens % block:
        widths = [(0, 0)] * x.ndim
        widths[1] = (0, -num_tokens % block)
        x = mx.pad(x, widths, constant_values=fill)
    x = x.reshape(batch, -1, block, num_groups, num_heads // num_groups, *tail)
    return mx.contiguous(mx.moveaxis(x, 2, 4))


def join_blocks(x: mx.array, num_tokens: int) -> mx.array:
    """[B, N, G, R, C, D] -> [B, T, G * R, D] without the padding."""
    batch, _, groups, repeats, _, dim = x.shape
    joined = x.transpose(0, 1, 4, 2, 3, 5).reshape(batch, -1, groups * repeats, dim)
    return joined[:, :num_tokens]


def decay_matrix(gates: mx.array) -> mx.array:
    """[.., C] gates within 0..1 -> [.., C, C]: at (t, s <= t) the product of gates s+1..t, else 0.

    Running products, not exp of differences of logarithms: a gate of zero is nothing special, a
    small gate early in the block costs no precision later, and `exp` is far dearer on a CPU.
    """
    upper, floor = _triangles(gates.shape[-1])
    # Down column s: ones to the diagonal, then the gates. The floor takes away the ones again.
    return mx.maximum(mx.cumprod(mx.maximum(gates[..., None], upper), axis=-2) - floor, 0.0)


def drop_faint(decay: mx.array) -> mx.array:
    """Decays below 2^-36 become zero: no one can tell, but an x86 core takes some hundred cycles
    for each number under 1e-38 that products of them would make."""
    return mx.maximum(decay - _FAINT, 0.0)


@cache
def _triangles(size: int) -> tuple[mx.array, mx.array]:
    """(ones on and above the diagonal; ones above it and 2^-36 elsewhere)."""
    ones = np.ones((size, size), dtype=np.float32)
    return mx.array(np.triu(ones)), mx.array(
        np.where(np.triu(ones, 1) > 0, 1.0, _FAINT).astype(np.float32)
    )
