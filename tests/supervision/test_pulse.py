"""When an engine counts as hung."""

from __future__ import annotations

from pippin.supervision.supervisor import Pulse


def make_pulse() -> Pulse:
    return Pulse(silence_limit=30.0, step_limit=300.0)


def test_an_engine_that_has_not_begun_may_load_for_long() -> None:
    pulse = make_pulse()
    pulse.pass_time(1e6)
    assert pulse.complaint is None


def test_a_process_that_is_silent_hangs_soon() -> None:
    pulse = make_pulse()
    pulse.beat(0.0)
    pulse.pass_time(29)
    assert pulse.complaint is None
    pulse.pass_time(1)
    assert pulse.complaint == (
        "the engine hangs: no heartbeat for 30 s (limit: --heartbeat-timeout 30)"
    )


def test_a_step_may_take_as_long_as_was_allowed() -> None:
    pulse = make_pulse()
    pulse.beat(299.0)
    assert pulse.complaint is None
    pulse.beat(300.0)
    assert pulse.complaint == (
        "the engine hangs: one step has taken 300 s so far (limit: --engine-timeout 300)"
    )


def test_a_sign_of_life_ends_the_silence() -> None:
    pulse = make_pulse()
    for turn in range(100):
        pulse.beat(float(turn))
        pulse.pass_time(29)
        assert pulse.complaint is None
