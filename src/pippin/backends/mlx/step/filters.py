"""What top_k, top_p and min_p take out of rows of scaled logits. Draws no tokens, knows no slots.

The rules are those of `sampling/rules.py`: a sort of the row and sums along it, of the SHORT
largest where that is enough. Masses are whole numbers there, whose sums are the same in any order.
To find a threshold bit by bit without a sort is 32 sums over the row, which took 2.5 times as long
on an H200; on Metal a sort of 248,320 tokens is 16 launches that move 132 bytes a token, and the
sums are 64 and 900.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.sampling.batches import DrawGroup
from pippin.backends.sampling.rules import MASS_UNITS, SHORT, Draw

# The few largest of very many numbers are found without a partition of all of them: a GPU's is a
# whole merge sort of the vocabulary, and a CPU's takes eight times as long as this.
BLOCK = 64  # as many maxima as numbers in the blocks chosen, roughly, for a vocabulary of 250k
WORTHWHILE = 4  # times as many numbers as there would be candidates
_OFF = 2.0  # a top_p that no sum of masses reaches
_NEARLY_ONE = 1e-6  # a top_p closer to 1 leaves no room for the rounding of its share


def dropped_tokens(x: mx.array, group: DrawGroup[mx.array]) -> mx.array | None:
    """Which tokens, bool [n, V], the group's filters take out of its scaled logits."""
    match group.draw:
        case Draw.SHORT_TOP_K:
            ascending = mx.sort(largest(x, min(SHORT, x.shape[-1])), axis=-1)
            return x < _top_k_threshold(ascending, group)
        case Draw.LONG_TOP_K | Draw.TOP_P:
            return _dropped_by_sort(x, group)
    return x < _min_p_threshold(x, group) if group.has_min_p else None


def _dropped_by_sort(x: mx.array, group: DrawGroup[mx.array]) -> mx.array:
    """All filters of a row that needs the order of the whole vocabulary.

    With top_p alone, tokens of less than (1 - top_p) / 2V of the likeliest one's mass weigh too
    little, all together, for one of them to be kept. So they may be made equal before the sort,
    which then takes a third of the time on peaked rows.
    """
    if group.draw is Draw.LONG_TOP_K:
        return x < _top_k_threshold(mx.sort(x, axis=-1), group)
    mass = mx.exp(x - x.max(axis=-1, keepdims=True))
    floor = mx.maximum((1.0 - group.top_p) / 2 - _NEARLY_ONE, 0.0) / x.shape[-1]
    ascending = mx.sort(mx.maximum(mass, floor), axis=-1)
    needed = _needed(_units(mass).sum(axis=-1, keepdims=True), group)
    kept = _above(_units(ascending)) < needed
    return mass < mx.maximum(_least(ascending, kept), group.min_p)


def _top_k_threshold(ascending: mx.array, group: DrawGroup[mx.array]) -> mx.array:
    """The least logit [n, 1] that is kept, of rows that hold at least the top_k largest."""
    in_top_k = mx.arange(ascending.shape[-1] - 1, -1, -1) < group.top_k
    units = _units(mx.exp(ascending - ascending[:, -1:])) * in_top_k
    kept = (_above(units) < _needed(units.sum(axis=-1, keepdims=True), group)) & in_top_k
    return mx.maximum(_least(ascending, kept), _min_p_threshold(ascending, group))


def _above(units: mx.array) -> mx.array:
    return mx.cumsum(units, axis=-1, reverse=True, inclusive=False)


def _least(ascending: mx.array, kept: mx.array) -> mx.array:
    """[n, 1]: of those that are kept, the last ones of each row; one at least, be it no number."""
    num_kept = mx.maximum(kept.sum(axis=-1, keepdims=True), 1)
    return mx.take_along_axis(ascending, ascending.shape[-1] - num_kept, axis=-1)


# ---- masses ------------------------------------------------------------------------------------


def _units(mass: mx.array) -> mx.array:
    return (mass * MASS_UNITS).astype(mx.int64)


def _needed(total: mx.array, group: DrawGroup[mx.array]) -> mx.array:
    """The units, int64 [n, 1], above a token that leave it out."""
    share = total.astype(mx.float32) * mx.minimum(group.top_p, _OFF)
    return mx.maximum(mx.ceil(share).astype(mx.int64), 1)


def _min_p_threshold(x: mx.array, group: DrawGroup[mx.array]) -> mx.array:
    return x.max(axis=-1, keepdims=True) + mx.log(group.min_p)


# ---- the largest -------------------------------------------------------------------------------


def largest(x: mx.array, k: int) -> mx.array:
    """The k largest of each row [n, V], in no order."""
    return mx.topk(candidates(x, k)[0], k, axis=-1)


def candidates(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Some entries of each row, the k largest among them: values and indices, [n, m].

    The k largest lie in the k blocks with the largest maxima: any number elsewhere is no larger
    than the maximum of its block, and so no larger than k others. Which of several equal numbers
    are found is left open.
    """
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
