"""A launched step on MLX: what it has yet to sample and what it will tell. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import mlx.core as mx
import numpy as np

from pippin.backends.base import Capture, PrefillRow, Spill, StepPlan, StepResult
from pippin.backends.mlx.cpu.operations.calls import check_operations
from pippin.backends.mlx.cpu.stream_clock import StreamClock
from pippin.backends.mlx.payloads.fingerprints import Fingerprints
from pippin.backends.mlx.payloads.packing import payload_arrays
from pippin.backends.mlx.payloads.transfers import MLXSpilled
from pippin.backends.mlx.step.sampler import Logprobs, Sampled, SampleRow
from pippin.types import Component, Payload, StepForwards, TokenLogprobs


@dataclass
class ToSample:
    """Rows of logits that a step has yet to turn into tokens; masked ones wait for the host."""

    rows: list[SampleRow] = field(default_factory=list)
    logits: list[mx.array] = field(default_factory=list)  # [n, vocab] each
    masked_rows: list[SampleRow] = field(default_factory=list)
    masked_logits: list[mx.array] = field(default_factory=list)

    def add(self, rows: Sequence[SampleRow], logits: mx.array, *, masked: bool) -> None:
        if any(row.slot for row in rows):
            (self.masked_rows if masked else self.rows).extend(rows)
            (self.masked_logits if masked else self.logits).append(logits)

    def take_unmasked(self) -> tuple[list[SampleRow], mx.array | None]:
        rows, logits = self.rows, self.logits
        self.rows, self.logits = [], []
        return rows, _stacked(logits)

    def take_masked(self) -> tuple[list[SampleRow], mx.array | None]:
        rows, logits = self.masked_rows, self.masked_logits
        self.masked_rows, self.masked_logits = [], []
        return rows, _stacked(logits)


@dataclass(frozen=True)
class SampledRows:
    slots: np.ndarray  # int32 [rows]; 0 where the row means nothing
    sampled: Sampled

    def tokens(self) -> dict[int, int]:
        """Waits for the step; reads the array's own buffer, which is no new device work."""
        values = np.asarray(self.sampled.tokens)
        pairs = zip(self.slots.tolist(), values.tolist(), strict=True)
        return {slot: token for slot, token in pairs if slot}

    def logprobs(self, wanted: Callable[[int], int | None]) -> dict[int, TokenLogprobs]:
        sampled = self.sampled
        if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return {}
        lines = list(
            token_logprobs(Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs))
        )
        found: dict[int, TokenLogprobs] = {}
        for slot, line in zip(self.slots.tolist(), lines, strict=True):
            top = wanted(slot) if slot else None
            if top is not None:
                found[slot] = TokenLogprobs(
                    line.logprob, line.top_ids[:top], line.top_logprobs[:top]
                )
        return found


@dataclass
class MLXPending:
    """A step in flight holds nothing but its results: `written` is emptied by the launch."""

    plan: StepPlan
    sample_rows: Callable[
        [MLXPending, Sequence[SampleRow], mx.array, np.ndarray | None], None
    ]  # a step, its rows, their logits, and packed masks of these rows
    num_top_logprobs: Callable[[int], int | None]  # by slot
    clock: StreamClock | None = None
    fingerprints: Fingerprints | None = None  # None: nobody takes any
    captures: list[Capture] = field(default_factory=list)
    spilled: list[MLXSpilled] = field(default_factory=list)
    loaded: list[Payload] = field(default_factory=list)
    sampled: list[SampledRows] = field(default_factory=list)
    prompt_logprobs: dict[int, list[Logprobs]] = field(default_factory=dict)
    last_scored: Logprobs | None = None  # of a prompt's positions: the next ones wait for it
    hidden: dict[int, mx.array] = field(default_factory=dict)  # [n], by slot: embeddings
    to_sample: ToSample = field(default_factory=ToSample)
    checks: list[tuple[np.ndarray, mx.array]] = field(default_factory=list)  # slots, bool each
    written: list[mx.array] = field(default_factory=list)
    fence: mx.array | None = None  # one number, ready when a step that samples nothing is
    dispatched: float = 0.0
    forwards: StepForwards = field(default_factory=StepForwards)

    def keep(self, capture: Capture) -> None:
        self.captures.append(capture)
        for payload in capture.payloads:
            self._make(payload)

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
        """Something for the tree."""
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

    def tell_hidden(self, slot: int, hidden: mx.array) -> None:
        self.hidden[slot] = hidden.astype(mx.float32)
        self.written.append(self.hidden[slot])

    def note_prefill(self, *, is_new: bool) -> None:
        ran = self.forwards
        self.forwards = replace(ran, prefill=ran.prefill + 1, new_prefill=ran.new_prefill + is_new)

    def note_decode(self, num_cohorts: int, *, is_new: bool, compiled: bool) -> None:
        ran = self.forwards
        self.forwards = replace(
            ran,
            cohorts=ran.cohorts + num_cohorts,
            new_decode=ran.new_decode + is_new,
            compiled=compiled,
        )

    def check(self, slots: np.ndarray, logits: mx.array) -> None:
        """Note rows of logits [rows, vocab] that are not numbers: then none of a row's is one."""
        overflowed = mx.isnan(logits[:, 0])
        self.checks.append((slots, overflowed))
        self.written.append(overflowed)

    def launch(self) -> None:
        """Everything written since the last call: what is left out would keep its graph alive."""
        if self.fingerprints is not None:
            self.written += self.fingerprints.launch(self.plan.step)
        if not self.sampled and self.written:
            last = self.written[-1]
            self.fence = last[(0,) * last.ndim] + 0  # a copy: a view would hold all of it
            self.written.append(self.fence)
        self.dispatched = self.dispatched or perf_counter()
        mx.async_eval(*self.written)
        self.written.clear()

    def dispatch(self) -> None:
        """mlx holds whoever hands it much up until the device has done most of it."""
        if self.written:
            self.launch()

    def sample(self, masks: np.ndarray) -> None:
        rows, logits = self.to_sample.take_masked()
        assert logits is not None, "this plan has no masked rows"
        lines = {slot: number for number, slot in enumerate(self.plan.masked_slots)}
        in_order = masks[[lines.get(row.slot, 0) for row in rows]]  # padding takes any
        self.sample_rows(self, rows, logits, in_order)
        self.launch()

    def wait(self) -> StepResult:
        self.dispatch()
        if self.fence is not None:
            mx.eval(self.fence)
        tokens: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        for sampled in self.sampled:
            tokens |= sampled.tokens()
            logprobs |= sampled.logprobs(self.num_top_logprobs)
        prompt_logprobs = {
            slot: tuple(entry for part in parts for entry in token_logprobs(part))
            for slot, parts in self.prompt_logprobs.items()
        }
        check_operations()
        return StepResult(
            tokens,
            logprobs,
            prompt_logprobs,
            tuple(self.captures),
            self._overflowed(),
            dispatched=self.dispatched,
            device=None if self.clock is None else self.clock.read(),
            forwards=self.forwards,
            hidden={slot: np.array(vector) for slot, vector in self.hidden.items()},
            spilled=tuple(self.spilled),
            loaded=tuple(self.loaded),
            damaged=() if self.fingerprints is None else self.fingerprints.read(self.plan.step),
        )

    def _overflowed(self) -> frozenset[int]:
        found = (slots[np.asarray(overflowed)].tolist() for slots, overflowed in self.checks)
        return frozenset(slot for part in found for slot in part if slot)

    def discard(self) -> None:
        if self.fingerprints is not None:
            self.fingerprints.forget(self.plan.step)
        for capture in self.captures:
            capture.release()
        for spilled in self.spilled:
            spilled.release()
        for payload in self.loaded:
            payload.release()
        self.captures.clear()
        self.spilled.clear()
        self.loaded.clear()


def token_logprobs(logprobs: Logprobs) -> Iterator[TokenLogprobs]:
    chosen, ids, tops = (np.asarray(array).tolist() for array in logprobs)
    for value, line_ids, line_tops in zip(chosen, ids, tops, strict=True):
        yield TokenLogprobs(value, tuple(line_ids), tuple(line_tops))


def _stacked(parts: list[mx.array]) -> mx.array | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
