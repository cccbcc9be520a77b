"""Where the time went: each second under one cause, all of them the wall time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases import cases
from churn import Breakdown, Rates, break_down
from pippin.metrics import StepRecord
from pippin.types import DeviceReading, StepForwards

RATES = Rates(
    decode_steps=((1, 0.01), (3, 0.02)),
    chunks=((100, 0.15), (500, 0.5)),
    prefill_tokens_per_second=1000.0,
    new_prefill=0.3,
    new_decode=0.1,
)
SETTLED = StepForwards()


def step(
    number: int,
    start: float,
    seconds: float,
    *,
    rows: int = 1,
    tokens: int = 0,
    forwards: StepForwards = SETTLED,
    launch: float = 0.001,
    waited: float = 0.005,
    busy: float | None = None,
) -> StepRecord:
    """A step in flight by itself, from its plan to its tokens; `busy`: the device's account."""
    end = start + seconds
    return StepRecord(
        step=number,
        planned=start,
        dispatched=start,
        launched=start + launch,
        device_done=end,
        resumed=end,
        committed=end,
        waited=waited,
        prefill_tokens=tokens,
        decode_rows=rows,
        ghosts=0,
        device=None if busy is None else DeviceReading(end, busy),
        forwards=forwards,
    )


def check(parts: Breakdown, **expected: float) -> None:
    assert {name: value for name, value in vars(parts).items() if abs(value) > 1e-9} == (
        pytest.approx(expected)
    )


NEW_SHAPES = StepForwards(new_prefill=1, new_decode=1)
KNOWN = step(0, 0.0, 0.01, busy=5.0)


@cases(
    ("what", "last", "before", "expected"),
    [
        (
            "work is what one batch takes for the same rows and tokens",
            step(0, 0.0, 0.3, rows=2, tokens=200),
            (),
            {"work": 0.215, "rest": 0.085},
        ),
        (
            "a new shape costs what it was measured to cost",
            step(0, 0.0, 0.5, forwards=NEW_SHAPES),
            (),
            {"work": 0.01, "new_shapes": 0.4, "rest": 0.09},
        ),
        (
            "small chunks cost more than their tokens in a batch",
            step(0, 0.0, 0.41, tokens=200, forwards=StepForwards(prefill=2)),
            (),
            {"work": 0.21, "small_chunks": 0.1, "rest": 0.1},
        ),
        (
            "a device that keeps account tells when it was idle",
            step(1, 0.01, 0.05, busy=5.02, launch=0.02),
            (KNOWN,),
            {"work": 0.02, "launching": 0.02, "idle_device": 0.01, "rest": 0.01},
        ),
        (
            "a device that is idle over a new shape counts once",
            step(1, 0.01, 0.13, busy=5.01, launch=0.12, forwards=replace(SETTLED, new_decode=1)),
            (KNOWN,),
            {"work": 0.02, "new_shapes": 0.1, "launching": 0.02},
        ),
        (
            "without an account it is busy while the host waits for it",
            step(0, 0.0, 0.05, waited=0.02),
            (),
            {"work": 0.01, "rest": 0.04},
        ),
        (
            "and idle while the host does not",
            step(0, 0.0, 0.05, waited=0.0, launch=0.03),
            (),
            {"work": 0.01, "launching": 0.03, "idle_device": 0.01},
        ),
        (
            "faster than one batch is a rest below zero",
            step(0, 0.0, 0.015, rows=3),
            (),
            {"work": 0.02, "rest": -0.005},
        ),
    ],
)
def test_each_second_has_one_cause(
    what: str, last: StepRecord, before: tuple[StepRecord, ...], expected: dict[str, float]
) -> None:
    parts = break_down([*before, last], RATES, 0.0, last.resumed)
    check(parts, **expected)
    assert parts.efficiency == pytest.approx(expected["work"] / last.resumed), what


def test_under_overlap_the_next_step_is_launched_within_this_one_s_span() -> None:
    first = step(0, 0.0, 0.01)
    second = replace(step(1, 0.01, 0.05, waited=0.0, launch=0.0), planned=0.005, launched=0.008)
    third = replace(step(2, 0.06, 0.01), planned=0.02, launched=0.045)
    parts = break_down([first, second, third], RATES, 0.0, 0.07)
    check(parts, work=0.03, launching=0.025, idle_device=0.015)


def test_time_without_requests_is_nobody_s_fault() -> None:
    first = step(0, 1.0, 0.01)
    second = replace(step(1, 3.0, 0.01), after_pause=True)
    parts = break_down([first, second], RATES, 0.5, 3.5)
    check(parts, work=0.02, no_requests=2.98)


def test_rates_are_interpolated_between_what_was_measured() -> None:
    assert RATES.decode_seconds(2) == pytest.approx(0.015)
    assert RATES.decode_seconds(0) == 0.0
    assert RATES.chunk_seconds(600, 2) == pytest.approx(2 * 0.325)
    assert RATES.chunk_seconds(1000, 1) == pytest.approx(0.5 + 0.5)
    assert RATES.chunk_seconds(0, 0) == 0.0
