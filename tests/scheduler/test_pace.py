"""Prompt budgets that keep running streams at their pace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest

from builders import FixedPace, make_client
from cases import cases
from pippin.scheduler.pace import (
    CHUNK_STEP,
    CROWDED_STEP,
    LONGEST_SAVED,
    LONGEST_STRETCH,
    SMALLEST_CHUNK,
    SMOOTH_STEP,
    STEP_STRETCH,
    STEPS_BETWEEN_RESTS,
    Pace,
    Timed,
)
from pippin.types import GRID

Device = Callable[[int, int], float]  # decode rows, prompt tokens: seconds

FORWARD_TOKENS = 32  # the forward's own cost, in tokens, of the devices here


def device(decode: float, row: float, token: float, noise: float = 0.0) -> Device:
    rng = random.Random(1)

    def seconds(rows: int, tokens: int) -> float:
        cost = (decode + row * rows) * (rows > 0)
        cost += (tokens + FORWARD_TOKENS) * token * (tokens > 0)
        return cost * rng.lognormvariate(0.0, noise)

    return seconds


def run(pace: Pace, seconds: Device, *, streams: int, prompts: int, steps: int) -> list[int]:
    """Serve prompts beside streams; the budgets that were not rests."""
    budgets = []
    for _ in range(steps):
        tokens = pace.budget(streams, prompts)
        pace.spend(tokens)
        pace.observe(Timed(seconds(streams, tokens), streams, tokens))
        budgets.append(tokens)
    return [tokens for tokens in budgets if tokens]


def stretch(streams: int, prompts: int = 1) -> float:
    return min(STEP_STRETCH * (1.0 + prompts / streams), LONGEST_STRETCH)


def measured(seconds: Device, prefill_tokens: int = 8192, steps: int = 100) -> Pace:
    """A pace that has seen its fill of such a device."""
    pace = Pace(prefill_tokens)
    run(pace, seconds, streams=4, prompts=1, steps=steps)
    return pace


def steady(pace: Pace, streams: int, prompts: int = 1) -> int:
    return next(tokens for _ in range(3) if (tokens := pace.budget(streams, prompts)))


def test_at_first_streams_have_a_step_to_themselves_then_a_block_beside_them() -> None:
    """The step without prompts tells what streams cost."""
    assert [Pace(512).budget(1), steady(Pace(512), 1)] == [0, GRID]
    assert steady(Pace(20), 1) == 20


def h200(rows: int, tokens: int) -> float:
    """With a small model: a forward costs more than eight steps without prompts, and chunks take as
    long as the next one of the lengths that are captured."""
    decode = (0.0012 + 0.00003 * rows) * (rows > 0)
    return decode + (0.0035 + 5.5e-6 * (-(-tokens // 256) * 256)) * (tokens > 0)


@cases(
    ("streams", "prompts", "step"),
    [
        *((streams, 1, SMOOTH_STEP) for streams in (1, 8, 32)),
        (32, 17, (SMOOTH_STEP + CROWDED_STEP) / 2),
        *((streams, 100, CROWDED_STEP) for streams in (1, 32, 99)),
    ],
)
def test_a_fast_device_computes_prompts_in_steps_that_no_reader_notices_unless_more_wait_than_run(
    streams: int, prompts: int, step: float
) -> None:
    pace = Pace(8192, max_gap=0.2)
    run(pace, h200, streams=streams, prompts=prompts, steps=60)
    budgets = run(pace, h200, streams=streams, prompts=prompts, steps=200)
    took = sorted(h200(streams, tokens) for tokens in budgets)
    assert took[-1] <= 1.2 * step
    assert took[len(took) // 2] >= 0.8 * step
    assert len(budgets) > 150  # no time is saved up


@pytest.mark.parametrize("token", [1e-5, 5e-5, 1e-4])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_step_with_prefill_stays_near_its_stretch(token: float, noise: float) -> None:
    pace = measured(device(0.01, 0.0002, token, noise), steps=200)
    decode = 0.01 + 0.0002 * 4
    ideal = (stretch(4) - 1.0) * decode / token - FORWARD_TOKENS
    assert steady(pace, 4) == pytest.approx(ideal, rel=0.05 + 3 * noise)


def test_it_learns_what_streams_cost_while_prompts_never_stop() -> None:
    """Learnt with one stream; then forty come, and with them twenty prompts."""
    seconds = device(0.008, 0.0006, 5e-5, noise=0.05)
    pace = Pace(2048)
    for _ in range(60):
        pace.observe(Timed(seconds(1, 0), 1, 0))
    budgets = run(pace, seconds, streams=40, prompts=20, steps=30)
    ideal = (stretch(40, 20) - 1.0) * (0.008 + 0.0006 * 40) / 5e-5 - FORWARD_TOKENS
    assert budgets[-1] > 0.8 * ideal


def test_a_cold_burst_is_not_served_in_crumbs() -> None:
    """Nothing was measured, and no step without prompts comes by itself."""
    seconds = device(0.008, 0.0006, 5e-5, noise=0.05)
    pace = Pace(8192)
    pace.observe(Timed(seconds(0, 8000), 0, 8000))
    budgets = run(pace, seconds, streams=2, prompts=20, steps=10)
    ideal = (LONGEST_STRETCH - 1.0) * 0.0092 / 5e-5 - FORWARD_TOKENS
    assert budgets[-1] > 0.8 * ideal


def test_streams_rest_now_and_then() -> None:
    pace = measured(device(0.01, 0.0, 1e-4))
    budgets = []
    for _ in range(3 * (STEPS_BETWEEN_RESTS + 1)):
        budgets.append(pace.budget(4))
        pace.spend(budgets[-1])
    rests = [i for i, tokens in enumerate(budgets) if tokens == 0]
    assert len(rests) == 3
    assert rests[2] - rests[1] == rests[1] - rests[0] == STEPS_BETWEEN_RESTS + 1


def test_short_chunks_do_not_make_prompts_look_dear() -> None:
    """Else each would make the next one shorter still."""
    seconds = device(0.01, 0.0, 1e-4)
    pace = measured(seconds)
    before = steady(pace, 4)
    for _ in range(50):
        pace.observe(Timed(seconds(4, 3), 4, 3))
    assert steady(pace, 4) == pytest.approx(before, rel=0.1)


def test_it_follows_a_device_that_changes_its_speed() -> None:
    pace = measured(device(0.01, 0.0, 1e-4))
    slower = device(0.01, 0.0, 1e-3)
    budgets = run(pace, slower, streams=4, prompts=1, steps=100)
    assert budgets[0] > GRID
    assert SMALLEST_CHUNK <= budgets[-1] < GRID


def test_a_pause_of_the_machine_does_not_lengthen_chunks() -> None:
    pace = measured(device(0.01, 0.0, 1e-4))
    before = steady(pace, 4)
    for _ in range(6):
        pace.observe(Timed(0.2, 4, 0))
    assert steady(pace, 4) == pytest.approx(before, rel=0.1)


def test_the_scheduler_counts_streams_and_prompts_that_wait() -> None:
    class Noted(FixedPace):
        asked: ClassVar[list[tuple[int, int]]] = []

        def budget(self, num_streams: int, num_prompts: int = 1, num_drafts: int = 0) -> int:
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


def test_where_forwards_dominate_prompts_come_in_large_chunks_with_rests_between() -> None:
    """As measured on a large GPU: 40 ms a forward whatever its length, 4 ms a decode step."""
    forward, decode, token = 0.040, 0.004, 1.7e-5

    def seconds(rows: int, tokens: int) -> float:
        return decode * (rows > 0) + (forward + token * tokens) * (tokens > 0)

    pace = Pace(8192)
    pace.observe(Timed(seconds(0, 4000), 0, 4000))
    pace.observe(Timed(seconds(0, 500), 0, 500))
    steps = []
    for _ in range(400):
        tokens = pace.budget(8, 1)
        pace.spend(tokens)
        pace.observe(Timed(seconds(8, tokens), 8, tokens))
        steps.append(tokens)
    chunks = [tokens for tokens in steps[100:] if tokens]
    assert seconds(0, min(chunks)) == pytest.approx(LONGEST_SAVED, rel=0.01)
    prompts = sum(seconds(0, tokens) for tokens in chunks)
    streams = decode * len(steps[100:])
    assert prompts / (prompts + streams) < (stretch(8) - 1.0) / stretch(8) + 0.1


def test_no_step_beside_streams_is_planned_to_take_longer_than_the_largest_gap() -> None:
    seconds = device(0.01, 0.0002, 1e-4)
    for max_gap in (0.02, 0.025, 0.1):
        pace = Pace(512, max_gap)
        run(pace, seconds, streams=4, prompts=100, steps=100)
        budgets = run(pace, seconds, streams=4, prompts=100, steps=100)
        assert max(seconds(4, tokens) for tokens in budgets) < 1.01 * max_gap
    assert steady(pace, 4, 100) < 512
    assert pace.budget(0) == 512  # nobody waits for a token


def test_short_chunks_are_of_few_lengths_and_no_costs_are_mistaken_for_it() -> None:
    def seconds(rows: int, tokens: int) -> float:
        return 0.0012 * rows * (rows > 0) + (0.008 + 0.00037 * tokens) * (tokens > 0)

    pace = Pace(8192)
    for streams in (4, 12, 8, 11, 6):
        budgets = run(pace, seconds, streams=streams, prompts=1, steps=100)
        rounded = [tokens for tokens in budgets if tokens % (CHUNK_STEP // 2) == 0]
        assert len(rounded) >= 0.8 * len(budgets)
    assert pace.costs.prefill_seconds(100) == pytest.approx(seconds(0, 100), rel=0.05)


def test_a_small_gap_is_kept_where_forwards_are_dear() -> None:
    """Chunks as long as the gap allows, with rests in between."""

    def seconds(rows: int, tokens: int) -> float:
        return 0.004 * (rows > 0) + (0.040 + 1.7e-5 * tokens) * (tokens > 0)

    pace = Pace(8192, 0.05)
    run(pace, seconds, streams=8, prompts=1, steps=100)
    budgets = run(pace, seconds, streams=8, prompts=1, steps=300)
    assert max(seconds(8, tokens) for tokens in budgets) == pytest.approx(0.05, rel=0.02)
    assert len(budgets) < 100


def test_a_prompt_that_is_sent_on_has_parts_that_are_worth_a_forward() -> None:
    pace = Pace(8_192)
    seconds = device(0.001, 0.0, 1e-4)
    run(pace, seconds, streams=2, prompts=4, steps=400)
    worth = 8 * pace.productive_tokens
    assert worth == pytest.approx(8 * FORWARD_TOKENS, rel=0.2)
    assert pace.part_tokens(32_768) == 2_048
    assert worth <= pace.part_tokens(1_000) < worth + GRID
    assert Pace(128).part_tokens(32_768) == 128
