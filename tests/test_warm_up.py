"""Warming up: made-up requests through real plans, and not a trace of them afterwards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator

import pytest

from pippin.backends.base import StepPlan, WarmUpShape
from pippin.backends.fake import FakeBackend
from pippin.backends.mlx.shapes import Ladder, at_least, to_warm_up
from pippin.backends.warm_up import WarmUp

SHAPES = [WarmUpShape(1, 64, num_steps=3), WarmUpShape(3, 16, num_before=32)]
DRAFTS = [WarmUpShape(2, 1, num_steps=1, depth=2, drafts_itself=own) for own in (False, True)]


def make(shapes: list[WarmUpShape], can_hold: bool = True) -> tuple[WarmUp, FakeBackend]:
    backend = FakeBackend(num_slots=4, max_depth=2)
    backend.shapes_to_warm_up = shapes
    backend.warm_up_seconds = math.inf
    return WarmUp(backend, lambda _: can_hold), backend


def test_every_shape_runs_once_and_leaves_nothing() -> None:
    warm_up, backend = make(SHAPES)
    told: list[str] = []
    warm_up.run_at_load(told.append)
    assert warm_up.done
    assert told == ["warming up 1 of 2", "warming up 2 of 2"]
    assert backend.ledger.nbytes == 0
    assert backend.memory_used() == FakeBackend(num_slots=4).memory_used()


def test_steps_with_drafts_are_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, backend = make(DRAFTS)
    launch, plans = backend.launch, []
    monkeypatch.setattr(backend, "launch", lambda plan: (plans.append(plan), launch(plan))[1])
    warm_up.run_at_load(lambda _: None)
    rows = [row for plan in plans for row in plan.decode]
    assert [(row.depth, row.drafted, row.num_drafts) for row in rows] == [(2, False, 0)] * 2 + [
        (2, True, 2)
    ] * 2
    assert warm_up.done
    assert backend.ledger.nbytes == 0


def test_what_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up, backend = make(SHAPES, can_hold=False)
    monkeypatch.setattr(backend, "launch", lambda _: pytest.fail("nothing was to be run"))
    warm_up.run_at_load(lambda _: None)
    assert warm_up.done


def test_what_a_load_has_no_time_for_is_left_for_later() -> None:
    warm_up, backend = make(SHAPES)
    backend.warm_up_seconds = 0.0
    warm_up.run_at_load(lambda _: pytest.fail("there was no time"))
    assert not warm_up.done
    warm_up.run_next()
    warm_up.run_next()
    assert warm_up.done


def test_after_a_failure_it_is_left_at_that(caplog: pytest.LogCaptureFixture) -> None:
    warm_up, backend = make(SHAPES)
    launch, plans = backend.launch, []

    def fails(plan: StepPlan) -> object:
        plans.append(plan)
        if plan.decode:
            raise RuntimeError("out of kernels")
        return launch(plan)

    backend.launch = fails  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        warm_up.run_next()
    assert warm_up.done
    assert plans[-1].retire
    assert "out of kernels" in caplog.text
    assert backend.ledger.nbytes == 0


def test_more_is_run_after_all_shapes(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []

    def fail(steps: Iterator[int], can_hold: Callable[[int], bool]) -> None:
        assert can_hold(1)
        ran.append(next(steps))
        raise RuntimeError("no memory to pin")

    _, backend = make(SHAPES)
    warm_up = WarmUp(backend, lambda _: True, [fail, fail])
    told: list[str] = []
    warm_up.run_at_load(told.append)
    assert told == [f"warming up {n} of 4" for n in (1, 2, 3)]
    assert len(ran) == 1
    assert warm_up.done
    assert "no memory to pin" in caplog.text


def test_lengths_are_rounded_up_by_little() -> None:
    for length in range(1, 5000):
        assert length <= at_least(length) <= max(length * 1.25, length + 1)
        assert length <= at_least(length, rungs=2) <= max(length * 1.5, length + 1)
    ladder = Ladder()
    assert len({ladder.chunk(n) for n in range(1, 8193)}) < 20
    assert len({ladder.prefix(n) for n in range(8193)}) < 10
    assert ladder.prefix(0) == 0


def test_every_rung_of_a_chunk_is_warmed_up() -> None:
    shapes = to_warm_up(2048, 64)
    rungs = {Ladder().chunk(n) for n in range(1, 2049)}
    assert rungs <= {Ladder().chunk(shape.num_tokens) for shape in shapes if shape.num_rows == 1}
    assert shapes[0] == WarmUpShape(1, 64, num_steps=3)
