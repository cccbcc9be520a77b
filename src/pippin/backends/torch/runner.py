"""Executes plans over one memory: its pools, rows, forwards and graphs. Knows no budget.

Pools are written in place, in the order of launches, on the forward stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from pippin.backends.torch.decodes import Decodes
from pippin.backends.torch.device import arrays_on
from pippin.backends.torch.drafts.drafters import StepDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts, make_drafts
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.graphs.steps import (
    CapturedSteps,
    chunk_steps,
    decode_steps,
    mixed_steps,
    verify_steps,
)
from pippin.backends.torch.mixed import MixedRows
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.plain.forward import ChunkForward, PlainForward
from pippin.backends.torch.plain.verify import PlainVerify
from pippin.backends.torch.pools.arena import MOST_MOVED_BYTES
from pippin.backends.torch.pools.fingerprints import TorchFingerprints, WordSums
from pippin.backends.torch.pools.kept_inputs import KeptInputs
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.pools.transfers import Transfers
from pippin.backends.torch.prompts import Prompts
from pippin.backends.torch.step.captures import Captures
from pippin.backends.torch.step.decode_inputs import Choice
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import Draws, TorchPending
from pippin.backends.torch.step.sizes import (
    MIXED_ROOMS,
    MIXED_WIDTHS,
    ROOM_ROWS,
    ROOMS,
    WIDTHS,
    MixedSize,
    Room,
    mixed_size_for,
    width_for,
)
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.verify.words import MOST_TOKENS, VerifySize, span_for
from pippin.backends.torch.streams import Streams
from pippin.backends.torch.verifies import Verifies
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
            num_rows = room.least_rows
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
            if width_for(num_rows) * (1 + depth) <= MOST_TOKENS
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

    def largest_mixed(self) -> MixedSize:
        """Of the steps that `_mixed_shapes` has."""
        num_decodes = min(self.num_slots - 1, MIXED_WIDTHS[-1])
        size = mixed_size_for(num_decodes, MIXED_ROOMS[-1].num_tokens, 1)
        assert size is not None
        return size

    @property
    def _widths(self) -> list[int]:
        """Rows of decode steps, of each width."""
        most = width_for(self.num_slots)
        return [min(width, self.num_slots) for width in WIDTHS if width <= most]

    def without_drafts(self) -> list[VerifySize]:
        """Of steps behind some with drafts, which are wider than any that has drafts."""
        widths = [width_for(num_rows) for num_rows in self._widths]
        span = span_for(self.max_depth)
        return [VerifySize(width, 0, span) for width in widths if 2 * width > MOST_TOKENS]


class _Captured(NamedTuple):
    """None: launched, or in plain operations."""

    decode: CapturedSteps[int] | None = None
    chunks: CapturedSteps[Room] | None = None
    mixed: CapturedSteps[MixedSize] | None = None
    verify: CapturedSteps[VerifySize] | None = None


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
            from pippin.backends.torch.kernels.packed.linear import by_kernels

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
        plain = PlainForward(decoder, self.pools)
        forward: ChunkForward = plain
        captured = _Captured()
        kept = KeptInputs(layout, ways.num_slots, ways.max_depth, decoder.device)
        self._drafts: RowDrafts | None = None
        drafter: StepDrafter | None = None
        if ways.max_depth:
            made = make_drafts(parts, decoder, draft, ways.num_slots, kernels=ways.draft_kernels)
            self._drafts, drafter = made or (None, None)
        if ways.kernels:
            forward, captured = self._make_kernels(plain, kept, drafter)
        plain_verify = PlainVerify(decoder, self.pools, kept)
        self._verifies = Verifies(
            parts, plain_verify, decoder.head, captured.verify, ways.max_depth, self._drafts
        )
        self.decodes = Decodes(
            parts,
            plain,
            captured.decode,
            self._verifies,
            deterministic=ways.deterministic,
            drafts=self._drafts,
        )
        self.prompts = Prompts(
            parts,
            forward,
            decoder.head,
            plain,
            captured.chunks,
            deterministic=ways.deterministic,
            max_tokens=ways.prefill_tokens,
            drafts=self._drafts,
        )
        self.mixed = MixedRows(parts, self.decodes, self.prompts, self._verifies, captured.mixed)

    # ---- a step ----------------------------------------------------------------------------

    def _begin(self, step: TorchPending, plan: StepPlan) -> None:
        if self.fingerprints is not None:
            self.fingerprints.begin()
        self._sent = self._transfers.send(plan.load)

    def _captured(self, step: TorchPending, retire: Retire) -> Iterator[Capture]:
        self._verifies.fold(retire.slot, retire.end)
        return self._captures.of_slot(retire)

    def _free(self, step: TorchPending, slot: int) -> None:
        self.rows.retire(slot)
        self._slots.retire(slot)
        self.prompts.retire(slot)

    def _start(self, step: TorchPending, admit: Admit) -> None:
        self._slots.admit(admit)
        if self._drafts is not None:
            self._drafts.start(admit)

    def _run(self, step: TorchPending, plan: StepPlan) -> None:
        self.mixed.run(step, plan)
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

    def captured(self) -> Iterator[CapturedSteps[Any]]:
        kinds = (self.decodes.steps, self.prompts.graphs, self.mixed.steps, self._verifies.steps)
        for steps in kinds:
            if steps is not None:
                yield steps

    def capture_largest(self) -> None:
        """So that smaller ones, captured later, fit into the memory that these have."""
        if self.decodes.steps is not None:
            self.decodes.steps.prepare(width_for(self._ways.num_slots))
        if self.prompts.graphs is not None:
            self.prompts.graphs.prepare(ROOMS[-1])
        if self.mixed.steps is not None:
            self.mixed.steps.prepare(self._ways.largest_mixed())
        if (steps := self._verifies.steps) is not None:
            depth = self._ways.max_depth
            width = max(w for w in WIDTHS if w * (1 + depth) <= MOST_TOKENS)
            num_drafts = 0 if self._drafts is None else depth
            for size in self._ways.without_drafts():
                steps.prepare(size)
            steps.prepare(VerifySize(width, depth, span_for(depth), num_drafts))

    def run_largest_drafts(self) -> None:
        if self._drafts is not None:
            self._drafts.run_largest()

    def free(self) -> None:
        """The memory, and the graphs over it, whatever payloads are still held."""
        for steps in self.captured():
            steps.graphs.clear()
        self.pools.free()

    def _make_kernels(
        self, plain: PlainForward, kept: KeptInputs, drafter: StepDrafter | None
    ) -> tuple[ChunkForward, _Captured]:
        # Triton is not everywhere.
        from pippin.backends.torch.kernels.decode import DecodeKernels
        from pippin.backends.torch.kernels.draw import choose
        from pippin.backends.torch.kernels.mixed import MixedKernels
        from pippin.backends.torch.kernels.prompt import ChunkKernels, PromptKernels
        from pippin.backends.torch.kernels.verify.forward import VerifyKernels

        decoder, pools, table = self._decoder, self.pools, self.rows.table
        future, recorder = self._future.tokens, self._ways.recorder
        if recorder is None and decoder.device.type == "cuda":
            recorder = CudaGraphs(decoder.device)
        decode = DecodeKernels(decoder, pools, table)
        most_rows = max(width_for(self._ways.num_slots), *ROOM_ROWS)
        logits = torch.empty(
            most_rows, decoder.shape.vocab_size, dtype=decoder.dtype, device=decoder.device
        )
        noted = self._fallbacks
        waste_cell = pools.layout.waste_cell
        steps = decode_steps(decode, choose, future, waste_cell, recorder, logits, noted)
        chunks, mixed = None, None
        if recorder is not None and self._ways.chunk_graphs:
            of_prompts = (decoder.head, choose, future, pools.layout, recorder, logits, noted)
            chunks = chunk_steps(PromptKernels(decoder, pools, table), *of_prompts)
            if self._ways.mixed:
                mixed = mixed_steps(MixedKernels(decoder, pools, table, decode), *of_prompts)
        verify = None
        if self._ways.draft_kernels and (max_depth := self._ways.max_depth):
            drafts = VerifyKernels(decoder, pools, kept, table, self._future, drafter)
            span = span_for(max_depth)
            verify = verify_steps(drafts, future, span, pools.layout, recorder, logits, noted)
        forward: ChunkForward = plain
        if self._ways.chunk_kernels:
            forward = ChunkKernels(decoder, pools, table)
        return forward, _Captured(steps, chunks, mixed, verify)

    def _make_sums(self) -> WordSums:
        if not self._ways.kernels:
            return WordSums(self.pools, self._streams)
        from pippin.backends.torch.kernels.word_sums import sum_words

        return WordSums(self.pools, self._streams, sum_words)
