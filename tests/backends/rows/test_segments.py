"""Rows lie in segments: a join copies no other row, and what is merged stays in order."""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import numpy as np
import pytest

from cases import cases
from kv_layouts import kv_layout
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, AttentionPaths
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.cpu.operations.bindings import Operations
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows import kv_table, mains
from pippin.backends.mlx.rows.arrays import TAIL
from pippin.backends.mlx.rows.footprint import Footprint, SpareLimit
from pippin.backends.mlx.rows.kv_table import Span, common_len, read_spans
from pippin.backends.mlx.rows.mains import Mains, Row
from pippin.backends.mlx.rows.segments import Segment

WIDTH, WINDOW = 6, 12
LAYOUT = kv_layout([None, WINDOW], 1, (1, 1))


class Rows:
    """Each column's only number is its row's name and its position."""

    def __init__(self, max_spare_bytes: float = np.inf) -> None:
        spare = SpareLimit(Footprint(LAYOUT), max_spare_bytes)
        self.mains = Mains(LAYOUT, spare, AttentionPaths(attend_joined))
        self.rows: dict[int, Row] = {}
        self.in_tail: dict[int, int] = {}
        self.num_named = 0

    def join(self, lengths: list[int]) -> None:
        free = [index for index in range(WIDTH) if index not in self.rows]
        joining = []
        for index, length in zip(free, lengths, strict=False):
            self.num_named += 1
            row = self.rows[index] = Row(self.num_named, index, length)
            self.in_tail[index] = 0
            kv = {0: self.columns(row, 0, length), 1: self.columns(row, length - WINDOW, length)}
            joining.append((row, kv))
        self.mains.join(joining)

    def columns(self, row: Row, start: int, end: int) -> KV:
        positions = np.arange(max(start, 0), end, dtype=np.float32)
        side = mx.array(1000.0 * row.slot + positions)[None, None, :, None]
        return side, -side

    def absorb(self, counts: dict[int, int]) -> None:
        """Tails with so many columns of each row."""
        tails = np.zeros((2, WIDTH, 1, TAIL, 1), np.float32)
        for index, row in self.rows.items():
            count = counts.get(index, 0)
            keys, values = self.columns(row, row.length, row.length + count)
            tails[0, index, 0, :count] = np.array(keys)[0, 0]
            tails[1, index, 0, :count] = np.array(values)[0, 0]
            row.length += count
        sides = [mx.array(side) for side in tails]
        self.mains.absorb({0: sides, 1: sides})

    def leave(self, index: int) -> None:
        self.mains.leave(self.rows.pop(index))

    def check(self) -> None:
        positions = np.zeros(WIDTH, np.int32)
        for index, row in self.rows.items():
            positions[index] = row.length
            for cache, window in ((0, None), (1, WINDOW)):
                pieces = self.mains.pieces_of(row, cache)
                found = np.concatenate([np.array(keys)[0, 0, :, 0] for keys, _ in pieces])
                expected = self.columns(row, row.length - (window or row.length), row.length)
                np.testing.assert_array_equal(found, np.array(expected[0])[0, 0, :, 0])
        shape, tree = self.mains.view(positions, positions)
        assert shape is not None
        assert all(len(columns) <= MOST_SEGMENTS for columns in shape.columns)
        for index, row in self.rows.items():
            for own, window in enumerate((None, WINDOW - 1)):
                places = np.array(tree["places"][own])[index]
                segments = tree["mains"][own]
                seen = [
                    np.array(values)[0, start : start + count, 0]
                    for (_, values), (start, count) in zip(segments, places, strict=False)
                ]
                expected = self.columns(row, row.length - (window or row.length), row.length)[1]
                np.testing.assert_array_equal(np.concatenate(seen), np.array(expected)[0, 0, :, 0])


def test_a_join_copies_no_other_row() -> None:
    rows = Rows()
    rows.join([40, 9])
    before = {id(array) for array in rows.mains.arrays()}
    rows.join([20])
    after = {id(array) for array in rows.mains.arrays()}
    assert before < after
    rows.check()


def test_when_there_are_too_many_the_smallest_neighbours_are_merged() -> None:
    rows = Rows()
    for length in (500, 400, 30, 20, 300):
        rows.join([length])
        rows.check()
    assert rows.mains._classes[0].held() == [500, 400, 50, 300]


def test_a_segment_that_no_row_is_in_is_dropped() -> None:
    rows = Rows()
    rows.join([40])
    rows.join([30])
    rows.leave(0)
    assert len(rows.mains.arrays()) == 4  # keys and values of two caches
    rows.check()


def test_spare_columns_are_given_up_when_there_are_too_many() -> None:
    rows = Rows(max_spare_bytes=0.0)
    rows.join([640, 640])
    rows.join([64])
    rows.leave(0)
    assert rows.mains.want_moving(WIDTH - len(rows.rows), 1)
    rows.absorb({1: 3, 2: 1})
    rows.check()
    (segment,) = rows.mains._classes[0].segments
    assert [side.shape[1] for side in segment.kv[0]] == [768, 768]  # of 708, in blocks of 64


@cases("seed", range(8))
def test_whatever_happens_rows_hold_their_own_columns_in_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows(max_spare_bytes=rng.choice([np.inf, 4096.0]))
    for _ in range(60):
        what = rng.random()
        if what < 0.35 and len(rows.rows) < WIDTH:
            rows.join([int(n) for n in rng.integers(1, 50, rng.integers(1, 3))])
        elif what < 0.5 and rows.rows:
            rows.leave(int(rng.choice(list(rows.rows))))
        elif rows.rows:
            rows.absorb({index: int(rng.integers(0, TAIL + 1)) for index in rows.rows})
        rows.check()


def tokens_of(spans: list[Span], segments: list[Segment]) -> list[float]:
    return [
        number
        for segment, start, count, _ in spans
        for number in np.array(segments[segment].kv[0][0])[0, start : start + count, 0].tolist()
    ]


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_begin_alike_name_the_same_columns(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all that a row holds is read for it once, by itself or with others."""
    monkeypatch.setattr(mains, "FEWEST_SHARED", 3)
    monkeypatch.setattr(mains, "SETTLED_STEPS", 2)
    monkeypatch.setattr(mains, "MOST_IN_TABLE", 3)
    monkeypatch.setattr(kv_table, "SHARE_COST_TOKENS", 8)
    rng = np.random.default_rng(seed)
    ours = cast(Operations, object())  # which nothing here calls
    held = Mains(LAYOUT, SpareLimit(Footprint(LAYOUT)), AttentionPaths(), ours)
    beginnings = rng.integers(0, 99, (2, 30))
    rows: dict[int, Row] = {}
    num_together = 0
    for number in range(40):
        free = [index for index in range(WIDTH) if index not in rows]
        if free and rng.random() < 0.6:
            start = beginnings[rng.integers(2)][: rng.integers(1, 31)]
            prompt = np.append(start, rng.integers(100, 999, rng.integers(1, 9))).astype(np.int32)
            row = rows[free[0]] = Row(number, free[0], len(prompt), prompt)
            side = mx.array(prompt.astype(np.float32))[None, None, :, None]
            last = side[:, :, -WINDOW:]
            held.join([(row, {0: (side, -side), 1: (last, -last)})])
        elif rows and rng.random() < 0.4:
            held.leave(rows.pop(int(rng.choice(list(rows)))))
        held.count_step()
        own = held._classes[0]
        spans = list(read_spans(own))
        num_together += sum(len(span.rows) > 1 for span in spans)
        for index, row in rows.items():
            assert row.prompt is not None
            for cache, window in ((0, None), (1, WINDOW)):
                found = [np.array(keys)[0, 0, :, 0] for keys, _ in held.pieces_of(row, cache)]
                expected = row.prompt if window is None else row.prompt[-window:]
                np.testing.assert_array_equal(np.concatenate(found), expected)
            read = [span for span in spans if index in span.rows]
            assert sorted(tokens_of(read, own.segments)) == sorted(row.prompt)
    assert num_together
    assert all(part.capacity == len(part.kv[0][0][0]) for part in held._classes[0].segments)


def test_what_two_prompts_begin_with_is_what_a_plain_loop_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        a, b = (rng.integers(0, 2, rng.integers(0, 6)) for _ in range(2))
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert common_len(a, b) == expected
