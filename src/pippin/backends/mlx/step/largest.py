"""The few largest of very many numbers, without a sort or a partition of all of them.

A GPU's partition is a whole merge sort of the vocabulary, and a CPU's takes eight times as long as
this. The k largest lie in the k blocks with the largest maxima: any number elsewhere is no larger
than the maximum of its block, and so no larger than k others. Ties make no difference to the values
that are found; which of several equal numbers are among them is left open.
"""

from __future__ import annotations

import mlx.core as mx

BLOCK = 64  # as many maxima as numbers in the blocks chosen, roughly, for a vocabulary of 250k
WORTHWHILE = 4  # times as many numbers as there would be candidates


def largest(x: mx.array, k: int) -> mx.array:
    """The k largest of each row [n, V], in no order."""
    return mx.topk(candidates(x, k)[0], k, axis=-1)


def candidates(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Some entries of each row, the k largest among them: values and indices, [n, m]."""
    num_rows, length = x.shape
    if length < WORTHWHILE * k * BLOCK:
        indices = mx.arange(length, dtype=mx.int32)
        return x, mx.broadcast_to(indices, x.shape)
    whole = length - length % BLOCK
    blocks = x[:, :whole].reshape(num_rows, -1, BLOCK)
    chosen = mx.argpartition(blocks.max(axis=-1), -k, axis=-1)[:, -k:]
    values = mx.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(num_rows, -1)
    indices = chosen[:, :, None].astype(mx.int32) * BLOCK + mx.arange(BLOCK, dtype=mx.int32)
    indices = indices.reshape(num_rows, -1)
    if whole == length:
        return values, indices
    rest = mx.broadcast_to(mx.arange(whole, length, dtype=mx.int32), (num_rows, length - whole))
    both = ((values, x[:, whole:]), (indices, rest))
    values, indices = (mx.concatenate(list(parts), axis=-1) for parts in both)
    return values, indices
