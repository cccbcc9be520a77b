"""What rows take at their peak, and the longest of their arrays. Counted on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kv_layouts import kv_layout
from pippin.backends.mlx.attention.packed_rows import AttentionPaths, attend_joined
from pippin.backends.mlx.layout import Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.rows import memory
from pippin.backends.mlx.rows.mains import Mains, Row
from pippin.backends.mlx.rows.memory import TAIL, Footprint, SpareLimit

WINDOW, WIDTH = 128, 6


class Rows:
    def __init__(self, layout: Layout, spare_bytes: float) -> None:
        self.layout, self.footprint = layout, Footprint(layout)
        self.mains = Mains(
            layout, SpareLimit(self.footprint, spare_bytes), AttentionPaths(attend_joined)
        )
        self.rows: dict[int, Row] = {}

    def drawn(self, num_tokens: int) -> dict[int, KV]:
        kv: dict[int, KV] = {}
        for index, cache in enumerate(self.layout.caches):
            held = min(num_tokens, cache.window or num_tokens)
            keys, values = (mx.ones((1, heads, held, dim)) for heads, dim in cache.shapes)
            kv[index] = keys, values
        mx.eval(list(kv.values()))
        return kv

    def join(self, num_tokens: int, kv: dict[int, KV]) -> None:
        index = next(n for n in range(WIDTH) if n not in self.rows)
        self.rows[index] = Row(index, index, num_tokens)
        self.mains.join([(self.rows[index], kv)])
        mx.eval(self.mains.arrays())

    def absorb(self) -> None:
        tails = {
            index: [mx.ones((WIDTH, heads, TAIL, dim)) for heads, dim in cache.shapes]
            for index, cache in enumerate(self.layout.caches)
        }
        for row in self.rows.values():
            row.length += TAIL
        self.mains.absorb(tails)
        mx.eval(self.mains.arrays())


def peak_of(work: Callable[[], None]) -> int:
    mx.reset_peak_memory()
    work()
    return int(mx.get_peak_memory())


@pytest.mark.parametrize("lengths", [[4000], [4000, 2000, 3000], [500, 4000, 30, 20, 300]])
def test_what_a_join_takes_at_its_peak_is_in_the_budget(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that is longer than all others is not in memory twice, nor those that are merged."""
    monkeypatch.setattr(memory, "SMALL_MOVE_BYTES", 1 << 16)
    gc.collect()
    mx.clear_cache()
    before = int(mx.get_active_memory())
    rows = Rows(kv_layout([None] * 8, 2, (16, 32)), spare_bytes=0.0)
    for number, length in enumerate(lengths, start=1):
        kv = rows.drawn(length)
        peak = peak_of(lambda length=length, kv=kv: rows.join(length, kv))  # type: ignore[misc]
        assert not kv
        assert peak - before <= sum(map(rows.footprint.row_bytes, lengths[:number]))


def test_no_array_of_rows_is_longer_than_a_device_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins and leaves within the budget that is made of it, moves included."""
    longest = 800_000
    layout = kv_layout([None, None, WINDOW, WINDOW], 2, (16, 32))
    most = Footprint(layout).most_bytes(longest)
    spare = most / 16
    rows = Rows(layout, spare)
    budget = rows.footprint.in_arrays_of(longest, 1 << 40, spare)
    assert budget == int(most - spare)
    sizes: list[int] = []
    for name in ("concatenate", "take", "contiguous", "pad", "zeros"):
        monkeypatch.setattr(mx, name, _noting(getattr(mx, name), sizes))
    rng = np.random.default_rng(0)
    largest = 0
    for _ in range(60):
        held = sum(rows.footprint.row_bytes(row.length + TAIL) for row in rows.rows.values())
        length = int(rng.integers(1, 900))
        fits = held + rows.footprint.row_bytes(length + TAIL) <= budget
        if fits and len(rows.rows) < WIDTH:
            rows.join(length, rows.drawn(length))
        elif rng.random() < 0.5 and held <= budget:
            rows.absorb()
        else:
            rows.mains.leave(rows.rows.pop(int(rng.choice(list(rows.rows)))))
        largest = max([largest, *(array.nbytes for array in rows.mains.arrays())])
    assert longest / 4 < largest <= max(sizes) <= longest


def _noting(function: Any, sizes: list[int]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        sizes.append(result.nbytes)
        return result

    return call


def test_a_budget_that_a_device_s_arrays_cannot_hold_is_cut_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    footprint = Footprint(kv_layout([None] * 2, 2, (16, 32)))
    # A token's values are a third of what it has: in two layers, keys and values twice as wide.
    assert footprint.most_bytes(1000) == 3000
    assert footprint.in_arrays_of(1000, 2000, 500) == 2000
    assert not caplog.records
    assert footprint.in_arrays_of(1000, 2600, 500) == 2500
    assert "More --memory does not help" in caplog.text
