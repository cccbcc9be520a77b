"""Rows are put in order again some steps after somebody came or went, before the tail is full."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from pippin.backends.mlx.cpu.operations.bindings import operations
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows.arrays import TAIL
from pippin.backends.mlx.rows.cohort_mains import SCATTERED_STEPS
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from serving import served

MODEL = "llama"


def advance(rows: DecodeRows, num_steps: int) -> None:
    loaded = served(MODEL)
    forward = DecodeForward(loaded.layout, loaded.forward)
    for _ in range(num_steps):
        rows.advance(list(rows.rows), lambda slots: mx.zeros(len(slots), mx.int32), forward)
    mx.eval(rows.arrays())


def prompt_of(num_tokens: int) -> PromptState:
    loaded, prompt = served(MODEL), PromptState()
    batch = ChunkBatch(loaded.layout, [np.zeros(num_tokens, dtype=np.int32)], [prompt])
    loaded.forward(batch.tokens, batch.caches)
    batch.advance()
    return prompt


def rows_of(num_rows: int) -> DecodeRows:
    rows = DecodeRows(served(MODEL).layout)
    rows.join([(slot, prompt_of(10)) for slot in range(1, num_rows + 1)])
    return rows


@pytest.mark.usefixtures("without_table")
def test_joined_rows_become_one_cohort_when_they_have_settled() -> None:
    rows = rows_of(4)
    advance(rows, SCATTERED_STEPS - 1)
    assert len(rows.mains.cohorts) == 4
    advance(rows, 1)
    assert (len(rows.mains.cohorts), rows.mains.cohorts[0].indices) == (1, [0, 1, 2, 3])


@pytest.mark.usefixtures("without_table")
def test_a_row_that_came_and_went_leaves_the_others_as_they_were_when_they_have_settled() -> None:
    rows = rows_of(4)
    advance(rows, SCATTERED_STEPS + 3)
    rows.join([(5, prompt_of(10))])
    advance(rows, 2)
    rows.leave(5)
    advance(rows, SCATTERED_STEPS - 3)
    assert rows.width == 6  # wider than its one cohort: such steps are not compiled
    advance(rows, 1)
    assert (rows.width, rows.mains.cohorts[0].indices) == (4, [0, 1, 2, 3])


def test_rows_with_a_table_stay_where_they_are() -> None:
    if operations() is None:
        pytest.skip("no operations of ours on this device: rows have no KV table")
    rows = rows_of(4)
    mains = [cohort.kv for cohort in rows.mains.cohorts]
    advance(rows, TAIL)
    assert [cohort.kv for cohort in rows.mains.cohorts] == mains
    advance(rows, 1)  # the tail was full
    assert len(rows.mains.cohorts) == 1
