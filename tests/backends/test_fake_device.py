"""The toy device's pace: steps end one after another, however early they were launched."""

from __future__ import annotations

import pytest

from pippin.backends import fake
from pippin.backends.fake import FakeDevice
from pippin.config import ModelConfig
from pippin.errors import ConfigError


def test_steps_end_one_after_another_at_the_given_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds

    monkeypatch.setattr(fake, "perf_counter", lambda: now)
    monkeypatch.setattr(fake, "sleep", sleep)
    paced = FakeDevice(step_seconds=2.0)
    for step in (0, 0, 1):  # a step has several pieces of work
        paced.enqueue(step, lambda: None)
    now += 0.5
    paced.run_until(0)
    assert waits == [1.5]
    paced.run_until(1)
    assert waits == [1.5, 2.0]
    now += 10.0
    paced.enqueue(2, lambda: None)
    now += 3.0
    paced.run_until(2)  # it has ended already
    assert waits == [1.5, 2.0, 0.0]


def test_a_pace_is_for_the_toy_alone() -> None:
    assert ModelConfig(backend="fake", fake_step=0.02).fake_step == 0.02
    with pytest.raises(ConfigError, match="--backend fake"):
        ModelConfig(fake_step=0.02)
    for seconds in (-1.0, 61.0, float("nan")):
        with pytest.raises(ConfigError, match="from 0 to 60 seconds"):
            ModelConfig(backend="fake", fake_step=seconds)
