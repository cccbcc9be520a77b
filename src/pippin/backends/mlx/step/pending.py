"""A step in flight on MLX: what it has yet to sample, and what it will return. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import mlx.core as mx
import numpy as np

from pippin.backends.base import Capture, PrefillRow, Spill, StepResult
from pippin.backends.mlx.cpu.operations import check_operations
from pippin.backends.mlx.cpu.stream_clock import StreamClock
from pippin.backends.mlx.payloads.fingerprints import MLXFingerprints
from pippin.backends.mlx.payloads.packing import payload_arrays
from pippin.backends.mlx.payloads.transfers import MLXSpilled
from pippin.backends.sampling.sampler import Logprobs, Sampled, SampleRow
from pippin.backends.step_outputs import StepOutputs
from pippin.types import Component, Payload

SampleRows = Callable[["MLXPending", Sequence[SampleRow], mx.array, np.ndarray | None], None]


@dataclass(kw_only=True)
class MLXPending(StepOutputs):
    """A step in flight holds nothing but its results: `written` is emptied by the launch."""

    sample_rows: SampleRows  # a step, its rows, their logits, and packed masks of these rows
    clock: StreamClock | None = None
    fingerprints: MLXFingerprints | None = None
    last_scored: Logprobs[mx.array] | None = None  # of a prompt: its next positions wait for it
    written: list[mx.array] = field(default_factory=list)
    fence: mx.array | None = None  # one number, ready when a step that samples nothing is
    # Rows with their logits [n, vocab], by whether they are masked: those wait for the host.
    to_sample: dict[bool, list[tuple[Sequence[SampleRow], mx.array]]] = field(
        default_factory=lambda: {False: [], True: []}
    )
    samples: bool = False

    def keep(self, capture: Capture) -> None:
        self.captures.append(capture)
        for payload in capture.payloads:
            self._make(payload)

    def keep_state(self, slot: int, state: Payload, length: mx.array) -> None:
        """Of a row behind its input token: before that it held `length` tokens, int32 [1]."""
        self._make(state)
        self.written.append(length)

        def read() -> None:
            end = int(np.asarray(length)[0]) + 1
            self.captures.append(Capture(slot, end - 1, end, states={end: state}))

        self.reads.append(read)

    def spill(self, spill: Spill, spilled: MLXSpilled) -> None:
        self.spilled.append(spilled)
        self.written += spilled.written
        if self.fingerprints is not None:
            for payload in spill.payloads:
                self.fingerprints.compare(payload, spilled.note_damage)

    def load(self, payload: Payload) -> None:
        self.loaded.append(payload)
        self._make(payload)

    def _make(self, payload: Payload) -> None:
        """Something for the prefix cache."""
        self.written += payload_arrays(payload)
        if self.fingerprints is not None:
            self.fingerprints.take(payload)

    def check_restored(
        self, row: PrefillRow, components: Collection[Component], *, later: bool = False
    ) -> None:
        """Have what a row is restored from compared with what it was. `later`: not before the
        next step is computed from it."""
        if self.fingerprints is not None and row.restore is not None:
            self.fingerprints.compare_restored(row.slot, row.restore, components, later=later)

    def note_prefill(self, *, is_new: bool) -> None:
        ran = self.forwards
        self.forwards = replace(ran, prefill=ran.prefill + 1, new_prefill=ran.new_prefill + is_new)

    def note_decode(self, *, is_new: bool, compiled: bool) -> None:
        ran = self.forwards
        self.forwards = replace(ran, new_decode=ran.new_decode + is_new, compiled=compiled)

    # ---- sampling --------------------------------------------------------------------------

    def add_to_sample(self, rows: Sequence[SampleRow], logits: mx.array, *, masked: bool) -> None:
        if any(row.slot for row in rows):
            self.to_sample[masked].append((rows, logits))

    def take_to_sample(self, *, masked: bool) -> tuple[list[SampleRow], mx.array | None]:
        parts, self.to_sample[masked] = self.to_sample[masked], []
        logits = [part for _, part in parts]
        joined = mx.concatenate(logits, axis=0) if len(logits) > 1 else next(iter(logits), None)
        return [row for rows, _ in parts for row in rows], joined

    def sample(self, masks: np.ndarray) -> None:
        rows, logits = self.take_to_sample(masked=True)
        assert logits is not None, "this plan has no masked rows, or they were sampled before"
        self.sample_rows(self, rows, logits, self.masks_of([row.slot for row in rows], masks))
        self.launch()

    # ---- results: read from an array's own buffer, which is no new device work ---------------

    def read_sampled(self, slots: Sequence[int], sampled: Sampled[mx.array]) -> None:
        self.samples = True
        self.reads.append(lambda: self.read_tokens(slots, np.asarray(sampled.tokens)))
        self.read_logprobs_of(slots, sampled)

    def read_logprobs_of(self, slots: Sequence[int], sampled: Sampled[mx.array]) -> None:
        found = sampled.logprobs
        if found is not None:
            asked = [slots[row] for row in sampled.asked]
            self.reads.append(lambda: self.read_logprobs(asked, *map(np.asarray, found)))

    def read_prompt_scores(self, slot: int, found: Sequence[Logprobs[mx.array]]) -> None:
        self.prompt_logprobs[slot] = []

        def read() -> None:
            for part in found:
                self.read_prompt_logprobs(slot, *map(np.asarray, part))

        self.reads.append(read)

    def read_hidden(self, slot: int, hidden: mx.array) -> None:
        wide = hidden.astype(mx.float32)
        self.written.append(wide)
        self.reads.append(lambda: self.hidden.update({slot: np.array(wide)}))

    def check(self, slots: np.ndarray, logits: mx.array) -> None:
        """Note rows of logits [rows, vocab] that are not numbers: then none of a row's is one."""
        overflowed = mx.isnan(logits[:, 0])
        self.written.append(overflowed)
        owners = slots.tolist()
        self.reads.append(lambda: self.read_overflows(owners, np.asarray(overflowed)))

    def launch(self) -> None:
        """Everything written since the last call: what is left out would keep its graph alive."""
        if self.fingerprints is not None:
            self.written += self.fingerprints.launch(self.plan.step)
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
        return self.result(None if self.clock is None else self.clock.read())
