"""How long steps took, as far as a host can see. Knows no arrays and nothing of costs.

A host sees a step's end if it waits for it. Else it had ended some time before: on CPUs mlx may
hold a launch up until most of its step has run (decode steps are submitted ahead of its limit), and
when that returns the step before has long been done.

    device    |  step 7  |         step 8          |
    host      launch 8 .......................... |  commit 7: when did it end?  |  launch 9 ...
                                     the end of 8, nearly

So the end of a launch that took as long as its step is the step's end. Where neither is seen, the
step is added to the next. A device that waits for a late host does so in the step that was late:
all that steps took is all of the time in which there were some.
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.metrics import NOTICEABLE_SECONDS, StepRecord
from pippin.scheduler.pacing.costs import Timed

NOTICEABLE_SHARE = 0.05  # of waiting, of the time since the last step was committed: likewise
HELD_UP_SHARE = 0.5  # of a launch, of the time since an end was known: its step held it up


@dataclass
class StepTimes:
    _last_end: float = 0.0
    _last_resumed: float = 0.0
    _unseen: Timed | None = None  # steps since then
    _began: float = 0.0  # of these

    def add(self, record: StepRecord) -> Timed | None:
        """A step that was committed; what it took, with those before it whose end was not seen."""
        dispatched, launched, resumed = record.dispatched, record.launched, record.resumed
        step = Timed.step(
            0.0,
            record.decode_rows,
            record.prefill_tokens,
            record.drafts,
            record.accepted,
            depth=max((depth for _, depth, _ in record.verified), default=0),
            turns=bool(record.own_drafts) != bool(record.drafts_left),
            is_new=record.forwards.new_decode > 0,
        )
        turn = resumed - max(dispatched, self._last_resumed)
        if dispatched >= self._last_resumed:  # nothing was in flight: the device had a pause
            self._unseen, self._last_end = None, dispatched
        self._last_resumed = resumed
        if self._unseen is None:
            self._began = self._last_end
        self._unseen = step if self._unseen is None else self._unseen.followed_by(step)
        if record.waited > max(NOTICEABLE_SECONDS, NOTICEABLE_SHARE * turn):
            end = resumed
        elif launched - dispatched > HELD_UP_SHARE * (launched - self._began) > 0.0:
            end = launched
        else:
            return None
        unseen, self._unseen = self._unseen, None
        self._last_end = end
        return unseen.with_seconds(end - self._began)
