"""The life of a slot: which stage may follow which, and what only gets worse."""

from __future__ import annotations

import itertools

import pytest

from builders import make_loop, make_prompt
from cases import cases
from pippin.messages import Submit, pack_tokens
from pippin.scheduler.request import NEXT_STAGES, Quality, RunningSlot, Stage
from pippin.types import SamplingParams


def make_running() -> RunningSlot:
    loop = make_loop()
    loop.submit(Submit("one", pack_tokens(make_prompt(20)), SamplingParams(max_tokens=4)))
    loop.step()
    (running,) = loop.scheduler.running_slots.values()
    return running


@cases(("before", "after"), list(itertools.product(Stage, Stage)))
def test_a_stage_is_entered_only_from_those_before_it(before: Stage, after: Stage) -> None:
    running = make_running()
    running.stage = before
    if after in NEXT_STAGES[before]:
        running.enter(after)
        assert running.stage is after
    else:
        with pytest.raises(AssertionError, match="slot 1"):
            running.enter(after)


def test_no_row_is_planned_for_a_slot_that_is_not_running() -> None:
    running = make_running()
    running.enter(Stage.PREEMPTING)
    with pytest.raises(AssertionError):
        running.plan_row(9, running.row_len + 1, samples=True)


def test_quality_only_gets_worse() -> None:
    running = make_running()
    for given, expected in (
        (Quality.DETACHED, Quality.DETACHED),
        (Quality.DAMAGED, Quality.DAMAGED),
        (Quality.TAINTED, Quality.DAMAGED),
        (Quality.SOUND, Quality.DAMAGED),
    ):
        running.worsen(given)
        assert running.quality is expected
    assert running.tainted
