"""A step in flight on MLX: arrays are lazy, and a launch evaluates all that it wrote."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import mlx.core as mx
import numpy as np

from pippin.backends.base import Capture, StepResult
from pippin.backends.mlx.cpu.operations import check_operations
from pippin.backends.mlx.payloads.packing import payload_arrays
from pippin.backends.mlx.payloads.payload import MLXFingerprints, sum_words
from pippin.backends.step.pending import Evaluated, Pending
from pippin.types import Payload


@dataclass(kw_only=True)
class MLXPending(Pending[mx.array]):
    """A step in flight holds nothing but its results: `written` is emptied by the launch."""

    fingerprints: MLXFingerprints | None = None
    # Of a prompt, what was scored last: its next positions wait for it.
    last_scored: Sequence[mx.array] = ()
    written: list[mx.array] = field(default_factory=list)
    fence: mx.array | None = None  # one number, ready when a step that samples nothing is

    def bring(self, arrays: Sequence[mx.array]) -> Evaluated:
        self.written += arrays
        return Evaluated(arrays)

    def note_made(self, arrays: Sequence[mx.array]) -> None:
        self.written += arrays

    def keep(self, capture: Capture) -> None:
        super().keep(capture)
        for payload in capture.payloads:
            self._make(payload)

    def keep_state(self, slot: int, state: Payload, length: mx.array) -> None:
        """Of a row behind its input token: before that it held `length` tokens, int32 [1]."""
        self._make(state)
        self.checkpoints[slot] = state
        self.read_later(
            self.bring([length]), lambda held: self.keep_checkpoint(slot, int(held[0]) + 1)
        )

    def load(self, payload: Payload) -> None:
        super().load(payload)
        self._make(payload)

    def _make(self, payload: Payload) -> None:
        """Something for the prefix cache."""
        self.written += payload_arrays(payload)
        if self.fingerprints is not None:
            self.fingerprints.take(payload)

    def note_prefill(self, *, is_new: bool) -> None:
        ran = self.forwards
        self.forwards = replace(ran, prefill=ran.prefill + 1, new_prefill=ran.new_prefill + is_new)

    def note_decode(self, *, is_new: bool, compiled: bool) -> None:
        ran = self.forwards
        self.forwards = replace(ran, new_decode=ran.new_decode + is_new, compiled=compiled)

    def sample(self, masks: np.ndarray) -> None:
        super().sample(masks)
        self.launch()

    def launch(self) -> None:
        """Everything written since the last call: what is left out would keep its graph alive."""
        if self.fingerprints is not None:
            self.fingerprints.launch(self.plan.step, lambda owners: sum_words(owners, self.bring))
        if not self.samples and self.written:
            last = next(a for a in reversed(self.written) if a.size)  # an indexer keeps no values
            self.fence = last[(0,) * last.ndim] + 0  # a copy: a view would hold all of it
            self.written.append(self.fence)
        self.dispatched = self.dispatched or perf_counter()
        mx.async_eval(*self.written)
        self.written.clear()

    def dispatch(self) -> None:
        """mlx blocks a thread that submits much, until the device has done most of it."""
        if self.written:
            self.launch()

    def wait(self) -> StepResult:
        self.dispatch()
        if self.fence is not None:
            mx.eval(self.fence)
        self.read_all()
        check_operations()
        return self.result()


MAX_SHAPES = 4096


class RecentShapes:
    def __init__(self, max_shapes: int = MAX_SHAPES) -> None:
        self._max_shapes = max_shapes
        self._shapes: OrderedDict[Hashable, None] = OrderedDict()

    def add(self, shape: Hashable) -> bool:
        """A forward of this shape is run; returns whether it is new."""
        is_new = shape not in self._shapes
        self._shapes[shape] = None
        self._shapes.move_to_end(shape)
        if len(self._shapes) > self._max_shapes:
            self._shapes.popitem(last=False)
        return is_new
