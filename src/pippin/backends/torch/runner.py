"""Executes plans over one memory: its pools, rows, forwards and graphs. Knows no budget.

Pools are written in place, in the order of launches, on the forward stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pippin.backends.base import (
    Admit,
    Capture,
    Load,
    Retire,
    Spill,
    StepPlan,
    WarmUpShape,
)
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.step.runner import StepRunner
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.device import arrays_on
from pippin.backends.torch.drafts.drafters import StepDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts, make_drafts
from pippin.backends.torch.forwards import Forwards
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
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import Draws, TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.words import (
    MIXED_ROOMS,
    MIXED_WIDTHS,
    MOST_VERIFIED,
    ROOMS,
    WIDTHS,
    StepSize,
    mixed_size_for,
    span_for,
    width_for,
)
from pippin.backends.torch.streams import Streams
from pippin.types import Payload


@dataclass(frozen=True)
class Ways:
    """How steps are run."""

    num_slots: int
    max_len: int
    prefill_tokens: int  # of the largest step
    deterministic: bool
    kernels: bool  # Triton's
    chunk_kernels: bool  # those of prompts, too
    draft_kernels: bool  # and those of steps with drafts
    recorder: CudaGraphs | None  # captures what is made of them; None: on GPUs CUDA graphs do
    chunk_graphs: bool
    mixed: bool  # decode rows beside chunks in one forward
    fingerprints: bool
    max_depth: int  # drafts of a row
    drafts_itself: bool

    def num_graphs(self) -> int:
        """That there can be."""
        if not self.kernels:
            return 0
        shapes = self.shapes_to_warm_up()
        drafted = [shape for shape in shapes if shape.depth]
        num_sizes = len(shapes) + self.drafts_itself * len(drafted)  # with drafts left, without
        if drafted:
            num_sizes += len(self._widths)  # of steps without drafts, behind some
        return len(Choice) * num_sizes

    def shapes_to_warm_up(self) -> list[WarmUpShape]:
        if not self.kernels:
            return []
        shapes = [WarmUpShape(num_rows, num_tokens=1, num_steps=1) for num_rows in self._widths]
        for room in ROOMS if self.chunk_graphs else ():
            num_rows = room.least_chunks
            if num_rows <= self.num_slots:
                shapes.append(WarmUpShape(num_rows, num_tokens=room.num_tokens // num_rows))
        if self.mixed:
            shapes += self._mixed_shapes()
        if not self.draft_kernels:
            return shapes
        return shapes + [
            WarmUpShape(num_rows, 1, num_steps=3, depth=depth, drafts_itself=self.drafts_itself)
            for num_rows in self._widths
            for depth in range(1, self.max_depth + 1)
            if width_for(num_rows) * (1 + depth) <= MOST_VERIFIED
        ]

    def _mixed_shapes(self) -> list[WarmUpShape]:
        """One chunk in each room beside rows of each width."""
        most = self.num_slots - 1
        narrower = zip(MIXED_WIDTHS, (0, *MIXED_WIDTHS), strict=False)
        beside = [min(width, most) for width, less in narrower if less < most]
        return [
            WarmUpShape(1, num_tokens=room.num_tokens, beside=num)
            for num in beside
            for room in MIXED_ROOMS
        ]

    @property
    def _widths(self) -> list[int]:
        """Rows of decode steps, of each width."""
        most = width_for(self.num_slots)
        return [min(width, self.num_slots) for width in WIDTHS if width <= most]

    def largest_sizes(self) -> list[StepSize]:
        """Of each kind that can be captured. Of steps behind some with drafts, those that are
        wider than any that has drafts."""
        if not self.kernels:
            return []
        sizes = [StepSize(width_for(self.num_slots))]
        if self.chunk_graphs:
            sizes.append(ROOMS[-1])
        if self.mixed:
            num_decodes = min(self.num_slots - 1, MIXED_WIDTHS[-1])
            size = mixed_size_for(num_decodes, MIXED_ROOMS[-1].num_tokens, 1)
            sizes += [] if size is None else [size]
        if self.draft_kernels and (depth := self.max_depth):
            span, widths = span_for(depth), [width_for(num) for num in self._widths]
            sizes += [StepSize(width, 0, span) for width in widths if 2 * width > MOST_VERIFIED]
            width = max(width for width in WIDTHS if width * (1 + depth) <= MOST_VERIFIED)
            sizes.append(StepSize(width, depth, span, depth if self.drafts_itself else 0))
        return sizes

    @property
    def kinds(self) -> frozenset[str]:
        """Of steps that are run by kernels (`StepSize.kind`)."""
        known = {
            StepSize(1): self.kernels,
            ROOMS[0]: self.chunk_kernels,
            MIXED_ROOMS[0]._replace(num_rows=1): self.mixed,
            StepSize(1, span=1): self.draft_kernels and self.max_depth > 0,
        }
        return frozenset(size.kind for size, has_kernels in known.items() if has_kernels)


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
        self.forwards = Forwards(
            parts,
            PlainForward(decoder, self.pools, kept),
            decoder.head,
            self._make_steps(kept, drafter) if ways.kernels else None,
            kinds=ways.kinds,
            chunk_graphs=ways.chunk_graphs,
            deterministic=ways.deterministic,
            max_tokens=ways.prefill_tokens,
            max_depth=ways.max_depth,
            drafts=self._drafts,
        )

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
