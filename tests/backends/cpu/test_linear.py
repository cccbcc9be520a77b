"""Few rows through a linear layer: blocks give what the whole product gives."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from pippin.backends.mlx.cpu import linear
from pippin.backends.mlx.cpu.linear import (
    SMALL_PRODUCT,
    Times,
    block_of,
    blocked_product,
    blocks_of,
    choose_rows,
    use_few_rows,
)


@pytest.mark.parametrize(
    ("num_rows", "shape"), [(1, (8192, 384)), (3, (1152, 512)), (4, (384, 4096)), (8, (8192, 384))]
)
def test_blocks_give_the_whole_product(num_rows: int, shape: tuple[int, int]) -> None:
    weight, x = mx.random.normal(shape), mx.random.normal((num_rows, 1, shape[1]))
    block = block_of(num_rows, *shape)
    assert block is not None
    assert num_rows * block * shape[1] <= SMALL_PRODUCT
    found = blocked_product(x, blocks_of(weight, block))
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    assert found.shape == (num_rows, 1, shape[0])
    assert np.abs(np.asarray(found) - exact).max() < 1e-3


def test_a_small_product_and_an_odd_width_stay_whole() -> None:
    assert block_of(1, 384, 384) is None
    assert block_of(4, 8191, 384) is None


def test_layers_made_over_equal_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = nn.Linear(512, 4096), mx.random.normal((2, 1, 512))
    table = nn.Embedding(4096, 512)
    expected = plain(x), table.as_linear(x)
    monkeypatch.setattr(linear, "_faster", {(4096, 512): frozenset({2})})
    calls = []
    original = linear.blocked_product
    monkeypatch.setattr(linear, "blocked_product", lambda *a: calls.append(a) or original(*a))
    for part in (plain, table):
        use_few_rows(part)
    found = plain(x), table.as_linear(x)
    assert len(calls) == 2
    for a, b in zip(found, expected, strict=True):
        assert mx.abs(a - b).max().item() < 1e-4


def test_only_numbers_of_rows_that_were_timed_are_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(linear, "_faster", {})
    weight = mx.random.normal((2048, 384))
    chosen = choose_rows([weight], tmp_path / "times.json")
    assert set(chosen) == {(2048, 384)}
    assert chosen[(2048, 384)] <= set(linear.TIMED_ROWS)


def test_blocks_are_chosen_where_they_are_clearly_faster_and_timed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed = []

    def time_both(weight: mx.array, num_rows: int, block: int) -> Times:
        timed.append(num_rows)
        return Times(plain_ms=1.0, blocks_ms=0.5 if num_rows < 4 else 0.95)

    monkeypatch.setattr(linear, "_time_both", time_both)
    weight, path = mx.zeros((2048, 384)), tmp_path / "times.json"
    for _ in range(2):
        monkeypatch.setattr(linear, "_faster", {})  # another process
        assert choose_rows([weight], path) == {(2048, 384): frozenset({2, 3})}
    with_a_block = [n for n in linear.TIMED_ROWS if block_of(n, *weight.shape)]
    assert timed == with_a_block
    choose_rows([weight.astype(mx.float16)], path)
    assert timed == 2 * with_a_block
