"""What rows hold survives being moved and merged, in order; a join copies no other row."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest

from kv_layouts import kv_layout
from pippin.backends.mlx.attention.packed_rows import AttentionPaths, attend_joined
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.rows import mains, memory
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.rows.mains import Mains, Row, Segment, Span, common_len, read_spans
from pippin.backends.mlx.rows.memory import COLUMN_STEP, Footprint, SpareLimit

HEADS = 2


WINDOW = 20


TOKENS = 1000  # of each alphabet: a row's vectors can be told from any other's


def vectors(tokens: np.ndarray, dim: int) -> mx.array:
    """[1, heads, n, dim]: what keys and values of these tokens are taken for."""
    head = np.arange(HEADS)[:, None, None]
    number = tokens[None, :, None] + 0.25 * head + np.linspace(0, 0.1, dim)
    return mx.array(number[None].astype(np.float32))


class Rows:
    """Decode rows whose vectors are made up, so that it is known what each must hold."""

    def __init__(self, layout: Layout, paths: AttentionPaths | None = None) -> None:
        self.layout = layout
        self.decode_rows = DecodeRows(layout, paths)
        self.tokens: dict[int, np.ndarray] = {}

    def join(self, slot: int, *prompts: np.ndarray) -> None:
        """Several at once are in slots one after the other."""
        coming = dict(enumerate(prompts, start=slot))
        states = [(each, self._prompt(tokens)) for each, tokens in coming.items()]
        self.decode_rows.join(states, {s: ids.astype(np.int32) for s, ids in coming.items()})
        self.tokens |= coming

    def _prompt(self, tokens: np.ndarray) -> PromptState:
        kv = {}
        for index, cache in enumerate(self.layout.caches):
            kept = tokens if cache.window is None else tokens[-cache.window :]
            kv[index] = tuple(vectors(kept, dim) for _, dim in cache.shapes)
        return PromptState(len(tokens), kv)  # type: ignore[arg-type]

    @property
    def mains(self) -> Mains:
        return self.decode_rows.mains

    def leave(self, slot: int) -> None:
        self.decode_rows.leave(slot)
        del self.tokens[slot]

    def say(self, slots: list[int], rng: np.random.Generator) -> None:
        """One step: a new token of each of these, written by hand where a forward would."""
        rows, per_row = self.decode_rows, self.decode_rows._per_row
        rows._make_room(dict.fromkeys(slots, 1))
        new = {slot: rng.integers(TOKENS) for slot in slots}
        for index, cache in enumerate(self.layout.caches):
            for side, (_, dim) in enumerate(cache.shapes):
                for slot, token in new.items():
                    line, at = rows.rows[slot].index, rows.rows[slot].num_tail
                    column = vectors(np.array([token]), dim)[0]
                    per_row.tails[index][side][line, :, at : at + 1] = column
        for slot, token in new.items():
            rows.rows[slot].length += 1
            self.tokens[slot] = np.append(self.tokens[slot], token)

    def check(self) -> None:
        for slot, tokens in self.tokens.items():
            for start in (0, len(tokens) // 2, len(tokens) - 1):
                self._check_kv(self.decode_rows.kv_of(slot, start), tokens, len(tokens) - start)

    def _check_kv(self, held: Mapping[int, KV], tokens: np.ndarray, wanted: int) -> None:
        for index, cache in enumerate(self.layout.caches):
            for side, (_, dim) in enumerate(cache.shapes):
                found = np.array(held[index][side])
                num_found = found.shape[2]
                expected = np.array(vectors(tokens, dim))[:, :, -num_found:]
                np.testing.assert_array_equal(found, expected)
                assert min(wanted, cache.window or wanted) <= num_found <= wanted


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short tails, few segments, and every beginning that can be shared is."""
    monkeypatch.setattr(memory, "TAIL", 8)
    monkeypatch.setattr(mains, "FEWEST_SHARED", 4)
    monkeypatch.setattr(mains, "SETTLED_STEPS", 3)
    monkeypatch.setattr(mains, "MOST_IN_TABLE", 5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", ["table", "without_table", "packed"])
def test_rows_that_come_pause_and_go_keep_what_they_hold(
    seed: int, way: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a table, in plain operations, and packed as a kernel reads them."""
    if way != "packed":
        request.getfixturevalue(way)
    if seed % 2:  # the device is waited for
        monkeypatch.setattr(memory, "SMALL_MOVE_BYTES", 0)
        monkeypatch.setattr(memory, "SMALL_TABLE_BYTES", 0)
    rng = np.random.default_rng(seed)
    paths = AttentionPaths(attend_joined) if way == "packed" else None
    rows = Rows(kv_layout([None, WINDOW, None], HEADS, (3, 4)), paths)
    beginning = rng.integers(0, TOKENS, 40)
    next_slot = 1
    shared = False
    for _ in range(120):
        choice = rng.random()
        if choice < 0.12 and len(rows.tokens) < 7:
            own = rng.integers(0, TOKENS, rng.integers(1, 30))
            rows.join(next_slot, np.append(beginning[: rng.integers(1, 80)], own))
            next_slot += 1
        elif choice < 0.18 and len(rows.tokens) > 1:
            rows.leave(int(rng.choice(list(rows.tokens))))
        elif rows.tokens:
            awake = [slot for slot in rows.tokens if rng.random() < 0.9]
            rows.say(awake, rng)
        whole, _ = rows.decode_rows.mains._classes
        shared |= sum(whole.held()) < sum(map(whole.num_columns, whole.pieces))
        if rng.random() < 0.1:
            rows.check()
    rows.check()
    assert shared is (way == "table")


def test_what_rows_hold_survives_and_nothing_of_those_who_left_does() -> None:
    rng = np.random.default_rng(1)
    rows = Rows(kv_layout([None, WINDOW], HEADS, (4, 5)), AttentionPaths(attend_joined))
    rows.join(1, np.full(70, 7 * TOKENS))
    rows.join(2, rng.integers(0, TOKENS, 30))
    rows.join(3, rng.integers(0, TOKENS, 600))
    for _ in range(3):
        rows.say([2, 3], rng)
    rows.check()
    rows.leave(1)
    rows.decode_rows.flush()
    rows.check()
    assert all((np.array(side) < 2 * TOKENS).all() for side in rows.decode_rows.mains.arrays())


WIDTH = 6


LAYOUT = kv_layout([None, WINDOW], 1, (1, 1))


def packed_rows() -> Rows:
    """As a kernel reads them."""
    return Rows(kv_layout([None, WINDOW], HEADS, (4, 5)), AttentionPaths(attend_joined))


def test_a_join_copies_no_other_row_and_a_segment_without_rows_is_dropped() -> None:
    rows = packed_rows()
    rows.join(1, np.arange(40))
    before = {id(array) for array in rows.mains.arrays()}
    rows.join(2, np.arange(100, 120))
    assert before < {id(array) for array in rows.mains.arrays()}
    rows.check()
    rows.leave(1)
    assert len(rows.mains.arrays()) == 4  # keys and values of two layers
    rows.check()


def test_when_there_are_too_many_the_smallest_neighbours_are_merged() -> None:
    rows = packed_rows()
    for slot, length in enumerate((500, 400, 30, 20, 300), start=1):
        rows.join(slot, np.arange(length) + slot)
        rows.check()
    assert rows.mains._classes[0].held() == [500, 400, 50, 300]


def test_spare_columns_are_given_up_when_there_are_too_many() -> None:
    rows = packed_rows()
    rows.join(1, np.arange(640), np.arange(300, 940))
    rows.join(3, np.arange(64) + 7)
    rows.decode_rows.spare.max_bytes = 0
    rows.leave(1)
    assert rows.mains.want_moving(0, 1)
    own = rows.mains._classes[0]
    assert own.capacity - sum(own.held()) >= 640
    rows.say([2, 3], np.random.default_rng(0))
    rows.decode_rows.flush()
    rows.check()
    assert own.capacity - sum(own.held()) < 2 * COLUMN_STEP  # of two segments


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
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 8)
    rng = np.random.default_rng(seed)
    held = Mains(LAYOUT, SpareLimit(Footprint(LAYOUT)), AttentionPaths(), has_table=True)
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
