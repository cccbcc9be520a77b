"""A KV array is built of vectors that lie in several others."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.rows.vector_table import VectorTable
from pippin.backends.mlx.tree.packing import KV

HEADS = 2


def pair_of(num_lines: int, columns: int) -> KV:
    """Keys of 4 numbers and values of 6."""
    shape = (num_lines, HEADS, columns)
    return mx.random.normal((*shape, 4)), mx.random.normal((*shape, 6))


def test_lines_are_picked_from_several_arrays() -> None:
    wide, narrow = pair_of(3, 7), pair_of(2, 5)
    table = VectorTable()
    in_wide, in_narrow = table.add(wide), table.add(narrow)
    both = in_wide.vectors(2, np.arange(1, 7)), in_narrow.vectors(0, np.arange(2))
    picked = [
        np.concatenate(both, axis=1),
        in_narrow.vectors(1, np.array([4, 0, 3])),
        in_wide.vectors(1, np.array([6])),
    ]
    found = table.take(picked, columns=8)
    for side, dim in ((0, 4), (1, 6)):
        a, b, new = (np.array(pair[side]) for pair in (wide, narrow, found))
        assert new.shape == (3, HEADS, 8, dim)
        np.testing.assert_array_equal(new[0], np.concatenate([a[2, :, 1:7], b[0, :, :2]], axis=1))
        np.testing.assert_array_equal(new[1, :, :3], b[1][:, [4, 0, 3]])
        np.testing.assert_array_equal(new[2, :, :1], a[1][:, [6]])


def test_padding_is_the_lines_own() -> None:
    """Masked or not: a row that overflowed must not spoil those that are regrouped with it."""
    good = pair_of(1, 5)
    keys, values = good
    table = VectorTable()
    in_bad, in_good = table.add((keys * mx.nan, values * mx.nan)), table.add(good)
    picked = [in_bad.vectors(0, np.arange(5)), in_good.vectors(0, np.arange(2))]
    for side in table.take(picked, columns=5):
        assert mx.isnan(side[0]).all().item()
        assert not mx.isnan(side[1]).any().item()


def test_one_array_alone_is_enough() -> None:
    pair = pair_of(2, 3)
    table = VectorTable()
    place = table.add(pair)
    keys, values = table.take([place.vectors(line, np.arange(3)) for line in (1, 0)], columns=3)
    assert mx.array_equal(keys, pair[0][::-1]).item()
    assert mx.array_equal(values, pair[1][::-1]).item()
