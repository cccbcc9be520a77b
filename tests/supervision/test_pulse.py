"""When an engine counts as hung."""

from __future__ import annotations

from pippin.supervision.pulse import IDLE_LIMIT_SECONDS, Pulse


def test_an_engine_that_has_not_begun_may_load_for_long() -> None:
    pulse = Pulse(30.0)
    pulse.pass_time(1e6)
    assert pulse.complaint is None


def test_an_idle_engine_hangs_soon() -> None:
    pulse = Pulse(300.0)
    pulse.heard(stepping=False)
    pulse.pass_time(IDLE_LIMIT_SECONDS - 1)
    assert pulse.complaint is None
    pulse.pass_time(1)
    assert pulse.complaint == "the engine hangs: it gave no sign of life for 30 s"


def test_a_step_may_take_as_long_as_was_allowed() -> None:
    pulse = Pulse(30.0)
    pulse.heard(stepping=True)
    pulse.pass_time(29)
    assert pulse.complaint is None
    pulse.pass_time(1)
    assert pulse.complaint == "the engine hangs: one step has taken 30 s so far"


def test_a_short_limit_holds_for_idle_engines_too() -> None:
    pulse = Pulse(2.0)
    pulse.heard(stepping=False)
    pulse.pass_time(2)
    assert pulse.complaint is not None


def test_a_sign_of_life_ends_the_silence() -> None:
    pulse = Pulse(30.0)
    pulse.heard(stepping=True)
    for _ in range(100):
        pulse.pass_time(29)
        pulse.heard(stepping=True)
        assert pulse.complaint is None
    pulse.pass_time(31)
    pulse.heard(stepping=False)
    assert pulse.complaint is None
