"""Executes plans over one memory: its pools, rows, forwards and graphs.

Pools are written in place, in the order of launches, on the forward stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from pippin.backends.base import (
    Admit,
    Capture,
    Load,
    Retire,
    Spill,
    StepPlan,
)
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.step.runner import StepRunner
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.device import arrays_on
from pippin.backends.torch.drafts.drafters import StepDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts, make_drafts
from pippin.backends.torch.forwards import Forwards, Ways
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.graphs.steps import CapturedSteps
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.plain.forward import PlainForward
from pippin.backends.torch.pools.arena import MOST_MOVED_BYTES
from pippin.backends.torch.pools.fingerprints import TorchFingerprints, WordSums
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import KeptInputs, Pools
from pippin.backends.torch.pools.payloads import Transfers
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.captures import Captures
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import Draws, TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.words import (
    StepSize,
    span_for,
    width_for,
)
from pippin.backends.torch.streams import Streams
from pippin.types import Payload


class Runner(StepRunner[TorchPending]):
    def __init__(
        self,
        decoder: Decoder,
        draft: Decoder | None,
        layout: PoolLayout,
        slots: Slots,
        future: FutureMap[torch.Tensor],
        streams: Streams,
        ways: Ways,
        capacity_bytes: int,
        fallbacks: Fallbacks,
    ) -> None:
        if ways.kernels:  # Triton is not everywhere
            from pippin.backends.torch.kernels.packed.products import by_kernels

            decoder, draft = by_kernels(decoder), by_kernels(draft)
        self._decoder = decoder
        self._slots = slots
        self._future = future
        self._streams = streams
        self._ways = ways
        self._fallbacks = fallbacks
        self.pools = Pools(layout, capacity_bytes, decoder.device, streams.forward)
        self.rows = Rows(self.pools, ways.num_slots, ways.max_len)
        self._transfers = Transfers(self.pools, streams)
        self._captures = Captures(self.pools, self.rows)
        self.fingerprints = TorchFingerprints(self._make_sums()) if ways.fingerprints else None
        self.draws = Draws(arrays_on(decoder.device), slots, future)
        parts = StepParts(self.pools, self.rows, self._captures, slots, future, self.draws, streams)
        kept = KeptInputs(layout, ways.num_slots, ways.max_depth, decoder.device)
        self._drafts: RowDrafts | None = None
        drafter: StepDrafter | None = None
        if ways.max_depth:
            made = make_drafts(parts, decoder, draft, ways.num_slots, kernels=ways.draft_kernels)
            self._drafts, drafter = made or (None, None)
        steps = self._make_steps(kept, drafter) if ways.kernels else None
        plain = PlainForward(decoder, self.pools, kept)
        self.forwards = Forwards(parts, plain, steps, ways, self._drafts)

    # ---- a step ----------------------------------------------------------------------------

    def _begin(self, step: TorchPending, plan: StepPlan) -> None:
        if self.fingerprints is not None:
            self.fingerprints.begin()
        self._sent = self._transfers.send(plan.load)

    def _captured(self, step: TorchPending, retire: Retire) -> Iterator[Capture]:
        self.forwards.fold(retire.slot, retire.end)
        return self._captures.of_slot(retire)

    def _free(self, step: TorchPending, slot: int) -> None:
        self.rows.retire(slot)
        self._slots.retire(slot)
        self.forwards.retire(slot)

    def _start(self, step: TorchPending, admit: Admit) -> None:
        self._slots.admit(admit)
        if self._drafts is not None:
            self._drafts.start(admit)

    def _run(self, step: TorchPending, plan: StepPlan) -> None:
        self.forwards.run(step, plan)
        if self._drafts is not None:
            self._drafts.note_sampled(step)

    def _gathered(self, spill: Spill) -> list[torch.Tensor]:
        return self._transfers.gathered(spill)

    def _loaded_payloads(self, step: TorchPending, loads: Sequence[Load]) -> list[Payload]:
        if not loads:
            return []
        payloads = self._transfers.load(loads, self._sent)
        # What it was loaded from may be used for something else once the step is committed.
        step.read_later(step.bring([]), lambda: None)
        return payloads

    def _finish(self, step: TorchPending, plan: StepPlan) -> None:
        if self.fingerprints is not None:
            made = [payload for capture in step.captures for payload in capture.payloads]
            for payload in (*made, *step.checkpoints.values(), *step.loaded):
                self.fingerprints.take(payload)
            self.fingerprints.launch(plan.step, self.fingerprints.sum_up)
        self.pools.arena.compact(MOST_MOVED_BYTES)

    def capture_largest(self) -> None:
        """So that smaller ones, captured later, fit into the memory that these have."""
        if (steps := self.forwards.steps) is not None:
            for size in self._ways.largest_sizes():
                steps.prepare(size)

    def run_largest_drafts(self) -> None:
        if self._drafts is not None:
            self._drafts.run_largest()

    def free(self) -> None:
        """The memory, and the graphs over it, whatever payloads are still held."""
        if self.forwards.steps is not None:
            self.forwards.steps.graphs.clear()
        self.pools.free()

    def _make_steps(self, kept: KeptInputs, drafter: StepDrafter | None) -> CapturedSteps:
        # Triton is not everywhere.
        from pippin.backends.torch.kernels.forward import KernelForward

        decoder, pools, recorder = self._decoder, self.pools, self._ways.recorder
        if recorder is None and decoder.device.type == "cuda":
            recorder = CudaGraphs(decoder.device)
        forward = KernelForward(decoder, pools, self.rows.table, self._future, kept, drafter)
        sizes = [*self._ways.largest_sizes()]
        if self._ways.max_depth:
            widest = width_for(self._ways.num_slots)
            sizes.append(StepSize(widest, 0, span_for(self._ways.max_depth)))
        return CapturedSteps(
            forward, pools.layout, recorder, sizes, decoder.device, self._fallbacks
        )

    def _make_sums(self) -> WordSums:
        if not self._ways.kernels:
            return WordSums(self.pools, self._streams)
        from pippin.backends.torch.kernels.word_sums import sum_words

        return WordSums(self.pools, self._streams, sum_words)
