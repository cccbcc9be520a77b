"""What steps took, told from what a host sees of a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import pytest

from pippin.metrics import StepRecord
from pippin.scheduler.pace import StepTimes, Timed
from pippin.types import StepForwards

BLANK = StepRecord(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0)
record = functools.partial(replace, BLANK)

DECODE, MIXED = 0.01, 0.04  # seconds of a step without prompts, and of one with 32 tokens


@dataclass
class HeldUp:
    """mlx on a CPU: a launch returns when a step's last few operations are left to run."""

    tail: float = 0.002
    host: float = 0.0  # seconds between a commit and the next launch
    now: float = 0.0
    free_at: float = 0.0
    told: list[Timed] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)

    def run(self, tokens_of_steps: list[int]) -> list[Timed]:
        """Each step is launched before the one before it is committed."""
        before = None
        for tokens in tokens_of_steps:
            self.now += self.host
            dispatched = self.now
            self.free_at = max(self.now, self.free_at) + (MIXED if tokens else DECODE)
            # A step without prompts is few operations: its launch is not held up.
            if tokens:
                self.now = max(self.now, self.free_at - self.tail)
            launched = (tokens, dispatched, self.now, self.free_at)
            if before is not None:
                self._commit(*before)
            before = launched
        return self.told

    def _commit(self, tokens: int, dispatched: float, launched: float, done: float) -> None:
        waited = max(0.0, done - self.now)
        self.now = max(self.now, done)
        timed = self.times.add(
            record(
                decode_rows=1,
                prefill_tokens=tokens,
                dispatched=dispatched,
                launched=launched,
                resumed=self.now,
                waited=waited,
            )
        )
        if timed is not None:
            self.told.append(timed)


def test_steps_that_are_waited_for_are_told_one_by_one() -> None:
    told = HeldUp().run([0] * 6)
    assert [timed.seconds for timed in told] == pytest.approx([DECODE] * 5)


def test_steps_that_hold_their_launch_up_are_told_one_by_one() -> None:
    told = HeldUp().run([32] * 8)
    assert [timed.seconds for timed in told[1:]] == pytest.approx([MIXED] * 6)


def test_a_late_host_makes_steps_longer() -> None:
    """Else steps that hold their launch up, after which the device runs dry, would look cheaper."""
    host, tail = 0.005, 0.002
    told = HeldUp(host=host, tail=tail).run([32] * 8)
    assert [timed.seconds for timed in told[1:]] == pytest.approx([MIXED + host - tail] * 6)


def test_a_step_whose_end_nobody_saw_is_told_with_the_next() -> None:
    """Else a rest would look as long as the chunk after it, and prompts would look free."""
    told = HeldUp().run([0, 32] * 6)
    for timed in told[1:]:
        shares = timed.num_prefills * MIXED + (timed.num_decodes - timed.num_prefills) * DECODE
        assert timed.seconds == pytest.approx(shares, abs=0.0021)
    assert sum(timed.num_prefills for timed in told) >= 4


def test_a_step_that_nobody_saw_before_a_pause_is_not_told_after_it() -> None:
    times = StepTimes()
    unseen = {"decode_rows": 0, "prefill_tokens": 0, "waited": 0.0}
    seen = {"decode_rows": 1, "prefill_tokens": 0, "waited": 0.009}
    times.add(record(**seen, dispatched=0.0, launched=0.001, resumed=0.01))
    assert times.add(record(**unseen, dispatched=0.005, launched=0.006, resumed=0.011)) is None
    later = times.add(record(**seen, dispatched=9.0, launched=9.001, resumed=9.01))
    assert later == Timed(pytest.approx(0.01), 1, 0)


def test_an_idle_device_is_not_charged_for() -> None:
    times = StepTimes()
    step = {"decode_rows": 1, "prefill_tokens": 0, "waited": 0.009}
    times.add(record(**step, dispatched=0.0, launched=0.001, resumed=0.01))
    later = times.add(record(**step, dispatched=9.0, launched=9.001, resumed=9.01))
    assert later == Timed(pytest.approx(0.01), 1, 0)


def test_what_steps_had_of_drafts_is_known() -> None:
    times = StepTimes()
    common = {"decode_rows": 2, "dispatched": 1.0, "launched": 1.0, "resumed": 2.0, "waited": 1.0}
    new = StepForwards(new_decode=1)
    begins = times.add(record(**common, drafts_left=3, forwards=new))
    assert begins is not None
    assert (begins.depth, begins.num_turns, begins.num_new) == (0, 1, 1)
    deep = {"drafts": 5, "accepted": 2, "verified": ((1, 2, 1), (2, 3, 1))}
    common |= {"dispatched": 2.0, "launched": 2.0, "resumed": 3.0}
    goes_on = times.add(record(**common, **deep, own_drafts=5, drafts_left=3))
    by_host = times.add(record(**common | {"dispatched": 3.0, "resumed": 4.0}, **deep))
    assert goes_on is not None
    assert by_host is not None
    for timed in (goes_on, by_host):
        assert (timed.depth, timed.num_turns, timed.num_new) == (3, 0, 0)
