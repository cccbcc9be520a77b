"""What steps ran that left no drafts, for a reader that is to draft after all. Knows no weights.

A head that starts to draft in the middle of a reply has seen nothing of it, and its first drafts
are half as often right. Hidden vectors of the last steps are kept, and fed when they are needed:

    steps      [ no drafts left | no drafts left | leaves drafts ]
    vectors      h1               h2               h3
    tokens       t1 (its input)   t2               t3, s3 (sampled)      fed: h1 t2, h2 t3, h3 s3
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.drafts.draft_rows import VerifyStep

MOST_OF_ROW = 24  # tokens, and
MOST_FED = 96  # of all rows


@dataclass(frozen=True)
class Ran:
    """Tokens that rows got in a step, and what they were sampled from. By line."""

    slots: np.ndarray  # int32 [width]; 0: no row
    lengths: mx.array  # int32 [width]: tokens that the row held before the step
    hidden: mx.array | None  # [width, n, hidden]: of the input token and of drafts behind it
    tokens: mx.array  # int32 [width, n]: sampled behind these
    inputs: mx.array | None  # int32 [width, 1]: what the rows ran first, if known
    counts: mx.array  # int32 [width]: of these how many are behind accepted drafts


class _Missed(NamedTuple):
    slots: np.ndarray  # int32 [width]
    inputs: mx.array  # int32 [width, 1]
    hidden: mx.array  # [width, 1, hidden]


class MissedSteps:
    """Of the same rows, one after the other; others start anew."""

    def __init__(self) -> None:
        self._steps: list[_Missed] = []

    def clear(self) -> None:
        self._steps.clear()

    def add(self, ran: VerifyStep) -> None:
        if not (ran.plain and ran.hidden):  # of others it is not known yet what they accept
            self._steps.clear()
            return
        if self._steps and self._steps[-1].slots.tobytes() != ran.slots.tobytes():
            self._steps.clear()
        self._steps.append(_Missed(ran.slots, ran.inputs, ran.hidden[0]))
        del self._steps[: -min(MOST_OF_ROW, max(1, MOST_FED // len(ran.slots)))]

    def before(self, ran: Ran) -> Ran:
        """A step of the same rows as one with those it missed."""
        steps = self._steps
        if (
            not steps
            or ran.inputs is None
            or ran.hidden is None
            or not np.array_equal(steps[-1].slots, ran.slots)
        ):
            return ran
        number = len(steps)
        hidden = [*(step.hidden for step in steps), ran.hidden]
        tokens = [*(step.inputs for step in steps[1:]), ran.inputs, ran.tokens]
        return replace(
            ran,
            lengths=ran.lengths - number,
            hidden=mx.concatenate(hidden, axis=1),
            tokens=mx.concatenate(tokens, axis=1),
            counts=ran.counts + number,
        )
