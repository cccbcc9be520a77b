"""Prompt budgets that keep running streams at their pace."""

from __future__ import annotations

import pytest

from pippin.scheduler.pace import SMALLEST_CHUNK, STEP_STRETCH, Pace
from pippin.types import GRID


def measured(decode_seconds: float, seconds_per_token: float, prefill_tokens: int = 512) -> Pace:
    """A pace that has seen its fill of steps of these costs."""
    pace = Pace(prefill_tokens)
    for _ in range(50):
        pace.observe(seconds=decode_seconds, prefill_tokens=0, decode_rows=4)
        pace.observe(
            seconds=decode_seconds + 100 * seconds_per_token, prefill_tokens=100, decode_rows=4
        )
    return pace


def test_without_streams_a_step_takes_all_it_may() -> None:
    assert Pace(512).budget(0) == 512
    assert measured(0.01, 1.0).budget(0) == 512


def test_before_anything_was_measured_a_stream_waits_for_one_grid_block() -> None:
    assert Pace(512).budget(1) == GRID
    assert Pace(20).budget(1) == 20


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-4, 2e-4])
def test_a_step_with_prefill_stays_within_its_stretch(seconds_per_token: float) -> None:
    decode_seconds = 0.01
    tokens = measured(decode_seconds, seconds_per_token).budget(3)
    assert tokens > SMALLEST_CHUNK
    assert decode_seconds + tokens * seconds_per_token <= STEP_STRETCH * decode_seconds + 1e-9


def test_budgets_of_a_block_or_more_end_on_the_grid() -> None:
    assert measured(0.01, 1e-4).budget(1) == 192  # 200 would fit


def test_prompts_are_never_starved_nor_given_more_than_the_limit() -> None:
    assert measured(0.001, 1.0).budget(8) == SMALLEST_CHUNK
    assert measured(0.001, 1.0, prefill_tokens=4).budget(8) == 4
    assert measured(10.0, 1e-6).budget(8) == 512


def test_it_follows_a_device_that_changes_its_speed() -> None:
    pace = measured(0.01, 1e-4)
    for _ in range(50):
        pace.observe(seconds=0.01 + 100 * 1e-3, prefill_tokens=100, decode_rows=4)
    assert pace.budget(1) in (19, 20)
