"""Runs shapes that are new to a device before a request needs them.

On GPUs a shape that was never seen costs far more than a known one: kernels are built, chosen and
loaded. A backend says which shapes it has, most likely first; made-up requests then go through the
same plans as real ones. While the model loads, for as long as the backend says; what is left, while
nothing else runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from time import monotonic

import numpy as np

from pippin.backends.base import (
    Admit,
    Backend,
    DecodeRow,
    PrefillRow,
    Proposal,
    Retire,
    StepPlan,
    StepResult,
    WarmUpShape,
)
from pippin.types import SamplingParams

logger = logging.getLogger(__name__)

More = Callable[[Iterator[int], Callable[[int], bool]], None]

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, top_k=20, top_p=0.95)


class WarmUp:
    """Only while no slot is held. `can_hold(n)`: whether so many bytes are free. `more`: called
    after all shapes, with the numbers of steps and `can_hold`."""

    def __init__(
        self, backend: Backend, can_hold: Callable[[int], bool], more: Sequence[More] = ()
    ) -> None:
        self._backend = backend
        self._can_hold = can_hold
        self._left: deque[WarmUpShape | More] = deque([*backend.shapes_to_warm_up, *more])
        self._number = len(self._left)
        self._steps = count(-(1 << 40))  # before those of any request

    @property
    def done(self) -> bool:
        return not self._left

    def run_at_load(self, progress: Callable[[str], None]) -> None:
        """Before the first request is taken."""
        began = monotonic()
        while not self.done and monotonic() - began < self._backend.warm_up_seconds:
            progress(f"warming up {self._number - len(self._left) + 1} of {self._number}")
            self.run_next()

    def run_next(self) -> None:
        """The next shape; one that does not fit is passed over."""
        following = self._left.popleft()
        if isinstance(following, WarmUpShape):
            self._run_shape(following)
            return
        try:
            following(self._steps, self._can_hold)
        except Exception as error:
            self._give_up(error)

    def _run_shape(self, shape: WarmUpShape) -> None:
        tokens = shape.num_before + shape.num_tokens + shape.num_steps * (1 + shape.depth)
        num_bytes = shape.num_rows * self._backend.row_bytes(tokens)
        num_bytes += shape.beside * self._backend.row_bytes(2)
        if not self._can_hold(num_bytes):
            return
        *steps, end = plans(shape, self._steps)
        try:
            held = -1 + shape.num_before + shape.num_tokens  # all but what was sampled last
            for plan in steps:
                held += len(self._run(plan).tokens.get(1, ()))
            if shape.depth:  # behind drafts that are kept
                self._run(StepPlan(next(self._steps), retire=(Retire(1, 0, held, captures=True),)))
        except Exception as error:
            self._give_up(error)
        self._run(end)

    def _give_up(self, error: Exception) -> None:
        """No request asked for it: it is only logged."""
        logger.warning("no more warming up: %s", error, exc_info=error)
        self._left.clear()

    def _run(self, plan: StepPlan) -> StepResult:
        result = self._backend.launch(plan).wait()
        for capture in result.captures:
            capture.release()
        return result


def plans(shape: WarmUpShape, steps: Iterator[int]) -> list[StepPlan]:
    """Prompts, a few tokens of their replies, and an end, with these numbers."""
    slots = range(1, shape.num_rows + 1)
    length = shape.num_before + shape.num_tokens
    prompt = np.zeros(length, dtype=np.int32)
    params = SAMPLED if shape.num_rows > 1 else GREEDY
    before = [PrefillRow(slot, 0, prompt[: shape.num_before], captures=True) for slot in slots]
    chunks = [
        PrefillRow(
            slot,
            shape.num_before,
            prompt[shape.num_before :],
            samples=True,
            captures=True,
            checkpoints=(length,),
            num_drafts=shape.depth * shape.drafts_itself,
        )
        for slot in slots
    ]
    others = range(shape.num_rows + 1, shape.num_rows + shape.beside + 1)
    admit = [Admit(slot, params, (), prompt, seed=slot) for slot in slots]
    admit += [Admit(slot, params, (), prompt[:1], seed=slot) for slot in others]
    first = before if shape.num_before else []
    first += [PrefillRow(slot, 0, prompt[:1], samples=True) for slot in others]
    found = [StepPlan(next(steps), admit=tuple(admit), prefill=tuple(first))]
    decode = tuple(DecodeRow(slot, 1) for slot in others)
    found.append(StepPlan(next(steps), decode=decode, prefill=tuple(chunks)))
    for number in range(shape.num_steps):
        # At most: drafts before it count as accepted.
        position = length + number + shape.depth * ((number + 1) // 2)
        rows = tuple(_row(shape, slot, position, number) for slot in slots)
        found.append(StepPlan(next(steps), decode=rows))
    ends = tuple(Retire(slot) for slot in (*slots, *others))
    return [*found, StepPlan(next(steps), retire=ends)]


def _row(shape: WarmUpShape, slot: int, position: int, number: int) -> DecodeRow:
    """Of a step of the reply: none but the first can know the backend's own drafts."""
    if not shape.depth or number % 2:
        return DecodeRow(slot, position)
    if shape.drafts_itself and not number:
        return DecodeRow(slot, position, depth=shape.depth, num_drafts=shape.depth)
    proposal = Proposal(position + 1, np.zeros(shape.depth, dtype=np.int32))
    return DecodeRow(slot, position, depth=shape.depth, proposal=proposal)
