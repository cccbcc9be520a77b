"""Inverts batches of unit lower triangular matrices by block substitution; knows no model.

    | lo   0  |^-1    | lo'           0   |
    | x    hi |     = | -hi' x lo'    hi' |      (' marks an inverse)

Blocks double from 2 to the full size. Every factor is a true sub-inverse, so nothing grows that
the answer does not hold: runs of one repeated token stay exact to rounding, where products of
powers (I+N)(I+N^2)(I+N^4)... lose everything.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

_BASE = 16
_ROUNDER = 1.5 * 2.0**-11


def unit_lower_inverse(strict: mx.array) -> mx.array:
    """(I - strict)^-1 for `strict` [..., n, n], n a multiple of 16 times a power of two.

    Only entries below the diagonal are read; the rest of `strict` may hold anything finite.
    """
    strict = _drop_faint(strict)
    size = strict.shape[-1]
    if size == _BASE:
        return _invert_base(strict)
    blocks = _invert_base(_block_pairs(strict, _BASE, 1, 0))
    block = _BASE
    while block < size:
        lower = _block_pairs(strict, block, 2, 1)
        lo, hi = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        blocks = stack_lower(lo, _drop_faint(hi @ lower @ lo), hi)
        block *= 2
    return blocks[..., 0, :, :]


def stack_lower(lo: mx.array, lower: mx.array, hi: mx.array) -> mx.array:
    """[[lo, 0], [lower, hi]] over the last two axes."""
    size = lo.shape[-1]
    # Writing into zeros takes half the time of concatenating on a CPU.
    whole = mx.zeros((*lo.shape[:-2], 2 * size, 2 * size), dtype=lo.dtype)
    whole[..., :size, :size] = lo
    whole[..., size:, :size] = lower
    whole[..., size:, size:] = hi
    return whole


def _block_pairs(matrix: mx.array, block: int, stride: int, offset: int) -> mx.array:
    """Blocks (offset, 0), (offset + stride, stride), ... on a new axis before the last two."""
    starts = range(0, matrix.shape[-1], stride * block)
    rows = offset * block
    return mx.stack(
        [matrix[..., i + rows : i + rows + block, i : i + block] for i in starts], axis=-3
    )


def _invert_base(strict: mx.array) -> mx.array:
    """Whole 16 x 16 blocks at once: a mask picks each level's off-diagonal part."""
    eye, levels = _base_constants()
    inverse = eye + strict * levels[0]
    for level in levels[1:]:
        inverse = _drop_faint(mx.addmm(inverse, inverse @ (strict * level), inverse))
    return inverse


def _drop_faint(x: mx.array) -> mx.array:
    """Round to multiples of 2^-34, far below what a sum with entries near one can hold.

    Paths of many small steps would else end under 1e-38, where an x86 core takes some hundred
    cycles per number; GPUs do not mind.
    """
    return x if mx.default_device() == mx.gpu else (x + _ROUNDER) - _ROUNDER


@cache
def _base_constants() -> tuple[mx.array, list[mx.array]]:
    """The identity, and per block size 1, 2, 4, 8 the part below it within twice the size."""
    index = np.arange(_BASE)
    masks = []
    for block in (1, 2, 4, 8):
        row, column = index[:, None] // block, index[None, :] // block
        masks.append((row % 2 == 1) & (row == column + 1))
    return mx.array(np.eye(_BASE, dtype=np.float32)), [
        mx.array(mask.astype(np.float32)) for mask in masks
    ]
