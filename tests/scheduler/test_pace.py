"""Prompt budgets that keep running streams at their pace."""

from __future__ import annotations

from typing import ClassVar

import pytest

from builders import FixedPace, make_client
from pippin.scheduler.pace import (
    FORWARD_TOKENS,
    LONGEST_STRETCH,
    SMALLEST_CHUNK,
    STEP_STRETCH,
    Pace,
)
from pippin.types import GRID


def measured(decode_seconds: float, seconds_per_token: float, prefill_tokens: int = 512) -> Pace:
    """A pace that has seen its fill of steps of these costs."""
    pace = Pace(prefill_tokens)
    for _ in range(50):
        pace.observe(seconds=decode_seconds, prefill_tokens=0, decode_rows=4)
        seconds = decode_seconds + (100 + FORWARD_TOKENS) * seconds_per_token
        pace.observe(seconds=seconds, prefill_tokens=100, decode_rows=4)
    return pace


def test_without_streams_a_step_takes_all_it_may() -> None:
    assert Pace(512).budget(0) == 512
    assert measured(0.01, 1.0).budget(0) == 512


def test_before_anything_was_measured_a_stream_waits_for_one_grid_block() -> None:
    assert Pace(512).budget(1) == GRID
    assert Pace(20).budget(1) == 20


@pytest.mark.parametrize("seconds_per_token", [1e-5, 5e-5, 1e-4])
def test_a_step_with_prefill_stays_within_its_stretch(seconds_per_token: float) -> None:
    decode_seconds = 0.01
    tokens = measured(decode_seconds, seconds_per_token, 8192).budget(3)
    cost = (tokens + FORWARD_TOKENS) * seconds_per_token
    assert tokens > SMALLEST_CHUNK
    assert decode_seconds + cost <= STEP_STRETCH * decode_seconds + 1e-9


def test_the_more_prompts_wait_the_longer_a_step_may_take_up_to_a_limit() -> None:
    decode_seconds, seconds_per_token = 0.01, 1e-4
    pace = measured(decode_seconds, seconds_per_token, 8192)
    budgets = [pace.budget(4, num_prompts) for num_prompts in (1, 2, 6, 100)]
    assert budgets == sorted(budgets)
    assert budgets[0] < budgets[1] < budgets[2] == budgets[3]
    cost = (budgets[3] + FORWARD_TOKENS) * seconds_per_token
    assert decode_seconds + cost <= LONGEST_STRETCH * decode_seconds + 1e-9


def test_prompts_are_never_starved_nor_given_more_than_the_limit() -> None:
    assert measured(0.001, 1.0).budget(8) == SMALLEST_CHUNK
    assert measured(0.001, 1.0, prefill_tokens=4).budget(8) == 4
    assert measured(10.0, 1e-6).budget(8) == 512


def test_short_chunks_do_not_make_prompts_look_dear() -> None:
    """Else each would make the next one shorter still."""
    pace = measured(0.01, 1e-4)
    before = pace.budget(1)
    for _ in range(50):
        pace.observe(seconds=0.01 + (3 + FORWARD_TOKENS) * 1e-4, prefill_tokens=3, decode_rows=4)
    assert pace.budget(1) == before


def test_it_follows_a_device_that_changes_its_speed() -> None:
    pace = measured(0.01, 1e-4)
    assert pace.budget(1) > GRID
    for _ in range(50):
        pace.observe(seconds=0.01 + 0.2, prefill_tokens=GRID, decode_rows=4)
    assert pace.budget(1) == SMALLEST_CHUNK


def test_a_pause_of_the_machine_does_not_lengthen_chunks() -> None:
    pace = measured(0.01, 1e-4)
    before = pace.budget(1)
    for _ in range(10):
        pace.observe(seconds=0.2, prefill_tokens=0, decode_rows=4)
    assert pace.budget(1) == before


def test_the_scheduler_counts_streams_and_prompts_that_wait() -> None:
    class Noted(FixedPace):
        asked: ClassVar[list[tuple[int, int]]] = []

        def budget(self, num_streams: int, num_prompts: int = 1) -> int:
            self.asked.append((num_streams, num_prompts))
            return super().budget(num_streams, num_prompts)

    client = make_client(num_slots=3, chunk=16)
    client.loop.scheduler.pace = Noted(16)
    client.submit(range(1, 9), max_tokens=50)
    client.loop.step()
    for first in (100, 200, 300):  # two get a slot, one of them in pieces, and one waits
        client.submit(range(first, first + 40), max_tokens=2)
    client.loop.step()
    client.loop.step()
    assert Noted.asked == [(0, 1), (1, 3), (1, 3)]
