"""Attention of decode rows over their KV table, against mlx's over one array of the same KV."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.attention.views import reads_table
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows import mains
from pippin.backends.mlx.rows.decode_rows import RowArrays
from pippin.backends.mlx.rows.mains import Piece, Segment, WindowClass, make_kv_table
from pippin.types import Component

SCALE = 0.3
HEADS, TAIL = 2, 8
TOLERANCE = 2e-5


def kv_cache(dims: tuple[int, int] = (16, 24), dtype: mx.Dtype = mx.float32) -> LayerCache:
    shapes = tuple((HEADS, dim) for dim in dims)
    return LayerCache(0, Component.ATTENTION, None, shapes, (dtype, dtype), Reads.PIECES)


def layout_of(*caches: LayerCache) -> Layout:
    return Layout(caches, (0,) * len(caches))


class Rows:
    """Rows with random keys and values, as arrays and as what each of them has in all."""

    def __init__(self, num_rows: int, dims: tuple[int, int] = (16, 24), seed: int = 0) -> None:
        self.dims = dims
        self.rng = np.random.default_rng(seed)
        self.lies = WindowClass(None, [0])
        self.own: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # [heads, tokens, dim]
        self.queries = self.normal(num_rows, 3 * HEADS, 1, dims[0])
        self.tail = [self.normal(num_rows, HEADS, TAIL, dim) for dim in dims]
        self.cursor = self.rng.integers(0, TAIL, num_rows)
        self.forget_what_is_behind()

    def forget_what_is_behind(self) -> None:
        """What no row has written is no number, but for this step's columns."""
        self.new = [self.normal(*side[:, :, :1].shape) for side in self.tail]
        for row, at in enumerate(self.cursor):
            for side in self.tail:
                side[row, :, at:] = np.nan

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.normal(size=shape).astype(np.float32)

    def add_segment(self, counts: dict[int, int], num_shared: int = 0) -> None:
        """Rows' columns one after the other, behind some that all of them begin with. Those of row
        -1, which has left, are not numbers."""
        shared = [self.normal(HEADS, num_shared, dim) for dim in self.dims]
        sides = [list[np.ndarray]() for _ in self.dims]
        if num_shared:
            for parts, begin in zip(sides, shared, strict=True):
                parts.append(begin)
        segment = Segment(num_shared + sum(counts.values()))
        start = num_shared
        for row, count in counts.items():
            own = [self.normal(HEADS, count, dim) for dim in self.dims]
            for parts, side in zip(sides, own, strict=True):
                parts.append(side * np.nan if row < 0 else side)
            if row >= 0:
                keys, values = (
                    np.concatenate(pair, axis=1) for pair in zip(shared, own, strict=True)
                )
                before = self.own.get(row, (keys[:, :0], values[:, :0]))
                self.own[row] = (
                    np.concatenate([before[0], keys], axis=1),
                    np.concatenate([before[1], values], axis=1),
                )
                found = [(0, num_shared), (start, count)]
                pieces = self.lies.pieces.setdefault(row, [])
                pieces += [Piece(segment, first, n) for first, n in found if n]
            start += count
        segment.kv[0] = [mx.array(np.concatenate(parts, axis=1)) for parts in sides]
        self.lies.segments.append(segment)

    def attend(
        self, ours: Any, *, window: int | None = None, sinks: np.ndarray | None = None
    ) -> np.ndarray:
        table = make_kv_table(layout_of(kv_cache(self.dims)), [self.lies])
        sink = [] if sinks is None else [mx.array(sinks)]
        *_, out = ours.row_attention([*self.given(), table, *sink], SCALE, 0, window or 0)
        return np.array(out)

    def given(self) -> list[mx.array]:
        """In the order in which the operation takes them."""
        sides = [*self.tail, *self.new, self.cursor.astype(np.int32), self.queries]
        return [mx.array(side) for side in sides]

    def expected(
        self, row: int, *, window: int | None = None, sinks: np.ndarray | None = None
    ) -> np.ndarray:
        seen = []
        for side in (0, 1):
            tail = self.tail[side][row][:, : self.cursor[row]]
            tail = np.concatenate([tail, self.new[side][row]], axis=1)
            whole = np.concatenate([self.own[row][side], tail], 1) if row in self.own else tail
            seen.append(mx.array(whole[None] if window is None else whole[None, :, -window:]))
        queries = mx.array(self.queries[row : row + 1])
        sink = None if sinks is None else mx.array(sinks)
        out = mx.fast.scaled_dot_product_attention(queries, *seen, scale=SCALE, sinks=sink)
        return np.array(out)

    def check(
        self, ours: Any, *, window: int | None = None, sinks: np.ndarray | None = None
    ) -> None:
        got = self.attend(ours, window=window, sinks=sinks)
        for row in range(len(self.queries)):
            want = self.expected(row, window=window, sinks=sinks)
            np.testing.assert_allclose(got[row : row + 1], want, rtol=0, atol=TOLERANCE)


def uneven_rows(dims: tuple[int, int] = (16, 24), seed: int = 0) -> Rows:
    """Two segments and one that a row has left, a row without a main, and one with nothing else."""
    rows = Rows(6, dims, seed)
    rows.cursor[2] = 0
    rows.forget_what_is_behind()
    rows.add_segment({4: 90, 1: 41, -1: 60, 2: 3})
    rows.add_segment({0: 7, 4: 20, 1: 2})
    rows.add_segment({5: 64, 4: 1})
    return rows


@pytest.mark.parametrize("dims", [(16, 24), (64, 64), (3, 5)])
def test_rows_of_all_lengths(ours: Any, dims: tuple[int, int]) -> None:
    uneven_rows(dims).check(ours)


@pytest.mark.parametrize("window", [1, 2, 5, 20, 60, 1000])
def test_rows_see_the_last_tokens_of_a_window(ours: Any, window: int) -> None:
    uneven_rows(seed=window).check(ours, window=window)


def test_sinks_weigh_along(ours: Any) -> None:
    rows = uneven_rows()
    sinks = rows.normal(3 * HEADS)
    rows.check(ours, sinks=sinks)
    without = rows.attend(ours)
    assert np.abs(without - rows.attend(ours, sinks=sinks)).max() > 0.01


@pytest.mark.parametrize("num_shared", [1, 64, 300])
def test_rows_that_share_what_they_begin_with(
    ours: Any, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 50)
    rows = Rows(5)
    rows.add_segment({3: 20, -1: 5, 0: 1, 2: 33}, num_shared=num_shared)
    rows.add_segment({1: 50, 2: 8}, num_shared=30)
    rows.check(ours)
    rows.check(ours, sinks=rows.normal(3 * HEADS))


def test_scores_far_apart_are_put_together_without_overflow(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 0)
    rows = Rows(2)
    rows.add_segment({0: 20, 1: 30}, num_shared=40)
    rows.queries *= 300
    rows.check(ours)


def test_a_kv_table_keeps_its_arrays_alive_and_no_longer(ours: Any) -> None:
    def make_table() -> mx.array:
        kv = [mx.random.normal((HEADS, 4096, 16)), mx.random.normal((HEADS, 4096, 24))]
        lies = WindowClass(None, [0])
        lies.append(Segment(4096, {0: kv}), {0: 4096})
        made = make_kv_table(layout_of(kv_cache()), [lies])
        mx.eval(made)
        return made

    mx.synchronize()
    before = mx.get_active_memory()
    made = make_table()
    nbytes = HEADS * 4096 * (16 + 24) * 4
    assert nbytes <= mx.get_active_memory() - before < 1.1 * nbytes
    del made
    mx.synchronize()
    assert mx.get_active_memory() - before < 1000


def test_a_compiled_step_runs_any_rows_of_a_table(
    ours: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was traced with other rows: nothing of theirs may be left in it."""
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 0)
    rows = [uneven_rows(seed=1), uneven_rows(seed=2)]
    rows[1].add_segment({3: 200, 1: 7}, num_shared=100)

    @mx.compile
    def step(given: list[mx.array], table: mx.array) -> mx.array:
        out: mx.array = ours.row_attention([*given, table], SCALE, 0, 0)[-1]
        return out + 0.0

    for one in rows:
        made = make_kv_table(layout_of(kv_cache()), [one.lies])
        got = step(one.given(), made)
        for row in range(6):
            np.testing.assert_allclose(
                np.array(got[row : row + 1]), one.expected(row), rtol=0, atol=TOLERANCE
            )


def test_what_the_operation_does_not_take_has_no_table() -> None:
    assert reads_table(layout_of(kv_cache()))
    assert not reads_table(layout_of(kv_cache(), kv_cache(dtype=mx.bfloat16)))
    latent = LayerCache(
        0, Component.ATTENTION, None, ((1, 8), (1, 4)), (mx.float32,) * 2, Reads.LATENT
    )
    assert not reads_table(layout_of(latent))


def written(ours: Any, tail: KV, columns: KV, cursor: list[int]) -> KV:
    """The tails with these columns."""
    num_rows, heads, count, dim = columns[0].shape
    made = make_kv_table(layout_of(kv_cache()), [WindowClass(None, [0])])
    queries, at = mx.zeros((num_rows, heads, count, dim)), mx.array(cursor, mx.int32)
    keys, values, _ = ours.row_attention([*tail, *columns, at, queries, made], SCALE, 0, 0)
    return keys, values


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_each_row_s_columns_are_written_at_its_cursor(ours: Any, dense: bool, count: int) -> None:
    rng = np.random.default_rng(3)
    sides = [rng.normal(size=(3, HEADS, TAIL, dim)).astype(np.float32) for dim in (16, 24)]
    keys, values = map(mx.array, sides)
    if not dense:  # as nobody makes them: they are copied
        keys, values = (mx.array(side.swapaxes(1, 2)).swapaxes(1, 2) for side in sides)
    # As a model hands them over: heads and tokens were turned around.
    new = [rng.normal(size=(3, count, HEADS, dim)).astype(np.float32) for dim in (16, 24)]
    new_keys, new_values = (mx.array(side).swapaxes(1, 2) for side in new)
    cursor = [5, 0, TAIL - 1]
    found = written(ours, (keys, values), (new_keys, new_values), cursor)
    for side, columns, got in zip(sides, new, found, strict=True):
        for row, at in enumerate(cursor):  # what has no place is not written
            end = min(at + count, TAIL)
            side[row, :, at:end] = columns[row].swapaxes(0, 1)[:, : end - at]
        assert np.array_equal(np.asarray(got), side)


def test_columns_are_written_where_the_tails_lie(ours: Any) -> None:
    """Also while somebody holds them, who sees the other columns as they were."""
    tail = mx.zeros((2, HEADS, TAIL, 16)), mx.zeros((2, HEADS, TAIL, 24))
    mx.eval(*tail)
    held = tail
    for at in range(3):
        column = tuple(mx.full((2, HEADS, 1, side.shape[3]), at + 1.0) for side in tail)
        tail = written(ours, tail, (column[0], column[1]), [at, at])
    mx.eval(*tail)
    for before, after in zip(held, tail, strict=True):
        assert np.shares_memory(np.asarray(before), np.asarray(after))
        assert np.asarray(before)[0, 0, :, 0].tolist() == [1.0, 2.0, 3.0, *[0.0] * (TAIL - 3)]


def test_tails_that_are_begun_anew_have_memory_of_their_own(ours: Any) -> None:
    """Those who move the old ones may come after the next column is written."""
    rows = RowArrays(layout_of(kv_cache()))
    rows.widen(2)
    old = rows.tails[0]
    rows.begin_tails()
    new = rows.tails[0]
    mx.eval(*old, *new)
    for before, after in zip(old, new, strict=True):
        assert not np.shares_memory(np.asarray(before), np.asarray(after))
        assert not np.asarray(after).any()
