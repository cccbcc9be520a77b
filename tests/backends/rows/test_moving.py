"""What rows hold survives being moved, and is not held twice on the way."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np
import pytest

from kv_layouts import kv_layout
from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.rows import arrays, mains, paced_launch
from pippin.backends.mlx.rows.decode_rows import DecodeRows

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

    def join(self, slot: int, tokens: np.ndarray) -> None:
        kv = {}
        for index, cache in enumerate(self.layout.caches):
            kept = tokens if cache.window is None else tokens[-cache.window :]
            kv[index] = tuple(vectors(kept, dim) for _, dim in cache.shapes)
        prompt = PromptState(len(tokens), kv)  # type: ignore[arg-type]
        self.decode_rows.join([(slot, prompt)], {slot: tokens.astype(np.int32)})
        self.tokens[slot] = tokens

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
    monkeypatch.setattr(arrays, "TAIL", 8)
    monkeypatch.setattr(mains, "FEWEST_SHARED", 4)
    monkeypatch.setattr(mains, "SETTLED_STEPS", 3)
    monkeypatch.setattr(mains, "MOST_IN_TABLE", 5)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_pause_and_go_keep_what_they_hold(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:  # the device is waited for
        monkeypatch.setattr(paced_launch, "SMALL_MOVE_BYTES", 0)
        monkeypatch.setattr(paced_launch, "SMALL_TABLE_BYTES", 0)
    rng = np.random.default_rng(seed)
    rows = Rows(kv_layout([None, WINDOW, None], HEADS, (3, 4)))
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
