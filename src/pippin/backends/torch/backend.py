"""The torch backend: executes plans. The one place of this backend that launches device work.

Pools are written in place, in the order of launches, on the forward stream. Nothing here waits for
the device except `TorchPending.wait`; on a CPU `launch` itself computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from pippin.backends.base import (
    Admit,
    DecodeRow,
    PrefillRow,
    Restore,
    Retire,
    StepPlan,
    WarmUpShape,
    captured_bytes,
)
from pippin.backends.chunking import cut_chunk, grid_blocks
from pippin.backends.torch.capture import CudaGraphs
from pippin.backends.torch.config import suit_kernels
from pippin.backends.torch.device import device_info
from pippin.backends.torch.forward import HEAD_TOKENS, ChunkForward, PlainForward
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.pools.layout import ZERO_SLAB, PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.pools.transfers import Transfers, host_memory, payload_arrays
from pippin.backends.torch.step.batches import (
    ChunkBatch,
    chunk_batch,
    decode_batch,
    inner_checkpoints,
)
from pippin.backends.torch.step.captures import Captures
from pippin.backends.torch.step.decode_inputs import Choice, RowArrays, SamplingColumns, pack_inputs
from pippin.backends.torch.step.future_map import FutureMap
from pippin.backends.torch.step.pending import Told, TorchPending, lines_of
from pippin.backends.torch.step.sampler import Sampler, SampleRow, token_logprobs
from pippin.backends.torch.step.widths import WIDTHS, width_for
from pippin.backends.torch.streams import Arrival, make_streams
from pippin.cache.disk.entries import ArraySpec, Bytes
from pippin.types import Component, ModelSpec, Payload

if TYPE_CHECKING:
    from pippin.backends.torch.graphs import DecodeSteps

ACTIVATION_SHARE = 0.1  # of what the weights leave
_NO_CELLS = np.zeros(0, dtype=np.int32)
DEFAULT_POOL_BYTES = 2 << 30  # where nobody set a budget; a CPU commits only what is used


class TorchBackend:
    """Slots in, tokens out."""

    restores_by_reference = True

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int,
        deterministic: bool = False,
        pool_bytes: int = DEFAULT_POOL_BYTES,
        kernels: bool | None = None,
        debug: bool = False,
    ) -> None:
        """`kernels`: Triton's, captured on GPUs. None: on GPUs, for shapes that they can take."""
        decoder = loaded.decoder
        self._decoder = decoder
        self._num_slots = num_slots
        self._deterministic = deterministic
        self._layout = PoolLayout(decoder.shape, decoder.dtype)
        self._streams = make_streams(decoder.device)
        self._sampler = Sampler(decoder.shape.vocab_size, num_slots, self._send)
        self._columns = SamplingColumns(num_slots, decoder.shape.vocab_size)
        self._prompt_lens = np.zeros(num_slots + 1, dtype=np.int64)
        if kernels is None:
            kernels = decoder.device.type == "cuda" and suit_kernels(decoder.shape)
        self._uses_kernels = kernels
        self._admitted: dict[int, Admit] = {}
        self._prompt_logprobs: dict[int, list[Arrival]] = {}
        self.device = device_info(decoder.device)
        widths = [width for width in WIDTHS if width <= num_slots] if self._uses_kernels else []
        self.shapes_to_warm_up: Sequence[WarmUpShape] = [
            WarmUpShape(width, num_tokens=1, num_steps=1) for width in widths
        ]
        self.spec = ModelSpec(
            name=loaded.name,
            vocab_size=decoder.shape.vocab_size,
            max_len=loaded.max_len,
            layers=self._layout.layer_specs(),
            state_taps=True,
            hidden_bytes=decoder.shape.hidden * decoder.dtype.itemsize,
        )
        with torch.inference_mode(), self._streams.forward():
            self._future_map = FutureMap(num_slots, decoder.device, debug=debug)
            self._make_pools(pool_bytes)

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        num_slots: int,
        dtype: str = "auto",
        max_len: int | None = None,
        deterministic: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> TorchBackend:
        with torch.inference_mode():
            loaded = load(path, dtype=dtype, max_len=max_len, progress=progress)
        return cls(loaded, num_slots=num_slots, deterministic=deterministic)

    def launch(self, plan: StepPlan) -> TorchPending:
        step = TorchPending(plan, self._sample_masked, self._num_top_logprobs)
        step.dispatched = perf_counter()
        try:
            with torch.inference_mode(), self._streams.forward():
                self._execute(step, plan)
        except BaseException:
            step.discard()  # nobody will
            raise
        return step

    def _execute(self, step: TorchPending, plan: StepPlan) -> None:
        for retire in plan.retire:
            self._retire(step, retire)
        for admit in plan.admit:
            self._admitted[admit.slot] = admit
            self._prompt_lens[admit.slot] = len(admit.prompt)
            self._sampler.admit(admit)
            self._columns.admit(admit.slot, self._sampler.of(admit.slot))
        for decodes in self._decode_groups(plan.decode):
            self._decode(step, decodes)
        for row in plan.prefill:
            if row.restore is not None:
                self._restore(row.slot, row.restore)
            assert self._rows.lengths[row.slot] == row.start, "chunks must follow each other"
            if self._continues_reply(row):
                self._future_map.note_read(np.array([row.slot]))
                self._sampler.count(row.slot, row.tokens[1:])  # the first was counted when drawn
        self._sample_restored(step, [row for row in plan.prefill if not len(row.tokens)])
        for chunks in self._chunk_groups([row for row in plan.prefill if len(row.tokens)]):
            self._prefill(step, chunks)
        step.spilled += [self._transfers.spill(spill) for spill in plan.spill]
        if plan.load:
            step.loaded += self._transfers.load(plan.load)
            # Whoever takes the step in may use what it was loaded from for something else.
            step.told.append(Told(self._streams.bring([]), lambda _: None))

    # ---- bytes -----------------------------------------------------------------------------

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """A restored prefix is read where the tree has it; a state is written in one place.

        Of layers with a window a row holds what it sees, and the chunk that it reads.
        """
        layout, own = self._layout, num_tokens - num_borrowed
        windowed = min(own, layout.shape.window + self.device.prefill_tokens)
        return (
            own * layout.cell_bytes(Component.ATTENTION)
            + windowed * layout.cell_bytes(Component.WINDOW)
            + layout.state_bytes
        )

    def transient_bytes(self, plan: StepPlan) -> int:
        return captured_bytes(self.spec, plan)

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        return payload_arrays(self._layout, component, num_tokens)

    def host_memory(self, nbytes: int) -> Bytes:
        return host_memory(self._decoder.device, nbytes)

    def limit_memory(self, budget_bytes: int) -> int:
        """Makes pools of that size, unless another engine over this model already holds some."""
        left = int((budget_bytes - self._decoder.nbytes) * (1.0 - ACTIVATION_SHARE))
        if held := self._pools.arena.used_bytes:
            return min(left, self._pools.capacity_bytes) - held
        if left > self._layout.slab_bytes:
            with torch.inference_mode(), self._streams.forward():
                self._make_pools(left)
        return left

    def memory_used(self) -> int:
        return self._decoder.nbytes + self._pools.arena.used_bytes

    def buffers_used(self) -> int:
        """Nobody counts them here."""
        return 0

    def make_way(self, *, busy: bool) -> None:
        """It has no work of its own."""

    def close(self) -> None:
        self._admitted.clear()

    def _make_pools(self, capacity_bytes: int) -> None:
        assert not self._admitted, "pools are made before requests run"
        self._pools = Pools(self._layout, capacity_bytes, self._decoder.device)
        self._rows = Rows(self._pools, self._num_slots, self.spec.max_len)
        self._transfers = Transfers(self._pools, self._streams)
        self._captures = Captures(self._pools, self._rows)
        self._plain = PlainForward(self._decoder, self._pools)
        self._forward: ChunkForward = self._plain
        self._decode_steps: DecodeSteps | None = None
        if self._uses_kernels:
            self._make_kernels()

    def _make_kernels(self) -> None:
        from pippin.backends.torch.graphs import DecodeSteps  # triton is not everywhere
        from pippin.backends.torch.kernels.decode import DecodeKernels
        from pippin.backends.torch.kernels.prefill import ChunkKernels

        self._forward = ChunkKernels(self._decoder, self._pools)
        self._decode_steps = DecodeSteps(
            DecodeKernels(self._decoder, self._pools, self._rows.table),
            self._future_map.tokens,
            self._layout.waste_cell,
            CudaGraphs() if self._decoder.device.type == "cuda" else None,
        )

    # ---- slots -----------------------------------------------------------------------------

    def _retire(self, step: TorchPending, retire: Retire) -> None:
        slot = retire.slot
        if retire.captures:
            step.captures += self._captures.of_slot(retire)
        self._rows.retire(slot)
        self._sampler.retire(slot)
        self._prompt_logprobs.pop(slot, None)
        self._admitted.pop(slot, None)  # a slot whose launch failed may hold nothing

    def _restore(self, slot: int, restore: Restore) -> None:
        cells, windows = (
            np.concatenate([_NO_CELLS, *(_kv(p).cells for p in restore.payloads.get(kind, ()))])
            for kind in (Component.ATTENTION, Component.WINDOW)
        )
        states = restore.payloads.get(Component.STATE, ())
        slab = _state(states[-1]).slab if states else ZERO_SLAB
        self._rows.borrow(slot, restore.length, cells, windows, slab)

    # ---- prefill ---------------------------------------------------------------------------

    def _chunk_groups(self, chunks: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        if self._deterministic:  # every block of the absolute grid by itself, always
            return [[block] for chunk in chunks for block in grid_blocks(chunk)]
        most = self.device.prefill_tokens
        if self._rows.windows is None or all(len(chunk.tokens) <= most for chunk in chunks):
            return [chunks] if chunks else []
        # No row may hold more of a window than `row_bytes` says.
        parts = [cut_chunk(chunk, range(chunk.start + most, chunk.end, most)) for chunk in chunks]
        return [
            [part for part in parts_now if part is not None] for parts_now in zip_longest(*parts)
        ]

    def _continues_reply(self, row: PrefillRow) -> bool:
        """Its slot has sampled before: the chunk begins with that token."""
        admit = self._admitted[row.slot]
        return len(row.tokens) > 0 and row.start >= len(admit.prompt) + len(admit.reply)

    def _prefill(self, step: TorchPending, chunks: Sequence[PrefillRow]) -> None:
        slots = np.array([chunk.slot for chunk in chunks])
        num_taps = sum(len(inner_checkpoints(chunk)) for chunk in chunks)
        self._pools.arena.make_room(
            sum(len(chunk.tokens) for chunk in chunks),
            self._rows.num_new_states(slots) + num_taps * self._rows.keeps_states,
        )
        batch = chunk_batch(chunks, self._rows, self._pools)
        step.captures += self._captures.of_chunks(batch)
        hidden = self._forward.chunks(batch)
        self._rows.let_go(slots)
        step.forwards = replace(step.forwards, prefill=step.forwards.prefill + 1)
        self._score_prompts(step, batch, hidden)
        hidden = hidden[batch.last]
        self._note_hidden(step, batch, hidden)
        self._tell_hidden(step, chunks, hidden)
        logits = self._forward.logits(hidden)
        self._check(step, [chunk.slot for chunk in chunks], logits)
        self._sample_prompts(step, chunks, logits)

    def _note_hidden(self, step: TorchPending, batch: ChunkBatch, hidden: torch.Tensor) -> None:
        wanted = {
            chunk.slot: number
            for number, chunk in enumerate(batch.rows)
            if chunk.captures and chunk.samples
        }
        for index, capture in enumerate(step.captures):
            number = wanted.get(capture.slot)
            if number is not None and not capture.retired and capture.end == batch.rows[number].end:
                payload = HiddenPayload(hidden[number].clone())
                step.captures[index] = replace(capture, hidden=payload)

    def _tell_hidden(
        self, step: TorchPending, rows: Sequence[PrefillRow], hidden: torch.Tensor
    ) -> None:
        """What the head read at the ends of prompts that are embedded."""
        ends = {
            row.slot: number
            for number, row in enumerate(rows)
            if row.samples and self._admitted[row.slot].embeds
        }
        if ends:
            told = hidden[self._pools.index(np.array(list(ends.values())))].float()
            read = partial(step.read_hidden, list(ends))
            step.told.append(Told(self._streams.bring([told]), lambda found: read(*found)))

    def _sample_restored(self, step: TorchPending, rows: Sequence[PrefillRow]) -> None:
        """Prompts that are restored whole: the head is all that is computed of them."""
        for group in [[row] for row in rows] if self._deterministic else [rows] if rows else []:
            hidden = torch.stack([_hidden_of(row) for row in group])
            self._tell_hidden(step, group, hidden)
            logits = self._forward.logits(hidden)
            self._check(step, [row.slot for row in group], logits)
            self._sample_prompts(step, group, logits)

    def _sample_prompts(
        self, step: TorchPending, rows: Sequence[PrefillRow], logits: torch.Tensor
    ) -> None:
        """The token after a prompt, or after what is known of a reply that goes on."""
        samples = [
            (number, self._sample_row(row), row.masked)
            for number, row in enumerate(rows)
            if row.samples
        ]
        self._sample(step, logits, samples)

    def _score_prompts(self, step: TorchPending, batch: ChunkBatch, hidden: torch.Tensor) -> None:
        first = 0
        for chunk in batch.rows:
            admit = self._admitted[chunk.slot]
            if admit.params.prompt_logprobs is not None and not self._continues_reply(chunk):
                self._score_chunk(step, chunk, admit, hidden[first : first + len(chunk.tokens)])
            first += len(chunk.tokens)

    def _score_chunk(
        self, step: TorchPending, chunk: PrefillRow, admit: Admit, hidden: torch.Tensor
    ) -> None:
        """Logits of positions start.. are for tokens start + 1..; the last is drawn."""
        targets = admit.prompt[chunk.start + 1 : chunk.end + 1]
        arriving = self._prompt_logprobs.setdefault(chunk.slot, [])
        for start in range(0, len(targets), HEAD_TOKENS):
            part = self._pools.index(targets[start : start + HEAD_TOKENS])
            logits = self._forward.logits(hidden[start : start + len(part)])
            scored = token_logprobs(logits, part, admit.params.prompt_logprobs or 0)
            arriving.append(self._streams.bring(scored))
        if chunk.samples:
            scores = step.prompt_logprobs.setdefault(chunk.slot, [])
            for arrival in self._prompt_logprobs.pop(chunk.slot):
                step.told.append(Told(arrival, lambda found: scores.extend(lines_of(*found))))

    # ---- decode ----------------------------------------------------------------------------

    def _decode_groups(self, decodes: Sequence[DecodeRow]) -> list[Sequence[DecodeRow]]:
        """All rows in one forward; or each in its own, so that no row's company matters."""
        if self._deterministic:
            return [[decode] for decode in decodes]
        return [decodes] if decodes else []

    def _decode(self, step: TorchPending, decodes: Sequence[DecodeRow]) -> None:
        slots = np.array([decode.slot for decode in decodes])
        positions = np.array([decode.position for decode in decodes])
        assert (self._rows.lengths[slots] == positions).all(), "positions must follow each other"
        self._future_map.note_read(slots)
        self._pools.arena.make_room(len(slots), self._rows.num_new_states(slots))
        cells = self._rows.grow_each(slots)
        rows = RowArrays(slots, positions, cells, *self._rows.next_states(slots))
        step.captures += self._captures.of_decodes(decodes)
        if self._decode_steps is not None:
            self._run_kernels(step, self._decode_steps, decodes, rows)
            return
        tokens = self._future_map.resolve(self._pools.index(slots))
        batch = decode_batch(rows, tokens, self._rows, self._pools)
        logits = self._plain.logits(self._plain.tokens(batch))
        self._rows.let_go(slots)
        self._check(step, slots.tolist(), logits)
        self._sample_decodes(step, decodes, logits)

    def _run_kernels(
        self,
        step: TorchPending,
        steps: DecodeSteps,
        decodes: Sequence[DecodeRow],
        rows: RowArrays,
    ) -> None:
        """One copy and one replay, unless a row needs the sampler."""
        slots = rows.slots
        generated = rows.positions + 1 - self._prompt_lens[slots]
        words = pack_inputs(width_for(len(slots)), rows, self._layout.waste_cell)
        self._columns.fill(words, slots, generated)
        choice = self._columns.choice(slots, generated)
        if any(decode.masked for decode in decodes):
            choice = Choice.LOGITS
        stepped = steps.run(words, choice)
        owners = slots.tolist()
        arrival = self._streams.bring([stepped.told[:, : len(owners)].clone()])
        if choice is Choice.LOGITS:
            step.told.append(Told(arrival, lambda found: step.read_overflows(owners, found[0][1])))
            self._sample_decodes(step, decodes, stepped.logits[: len(owners)])
            return
        sampled = [decode.slot for decode in decodes if decode.samples]
        self._future_map.note_written(np.array(sampled))
        step.told.append(Told(arrival, lambda found: step.read_drawn(owners, sampled, found[0])))

    def _sample_decodes(
        self, step: TorchPending, decodes: Sequence[DecodeRow], logits: torch.Tensor
    ) -> None:
        samples = [
            (number, self._sample_row(decode), decode.masked)
            for number, decode in enumerate(decodes)
            if decode.samples
        ]
        self._sample(step, logits, samples)

    def _sample_row(self, row: DecodeRow | PrefillRow) -> SampleRow:
        return SampleRow(row.slot, row.end - int(self._prompt_lens[row.slot]))

    # ---- sampling --------------------------------------------------------------------------

    def _check(self, step: TorchPending, slots: Sequence[int], logits: torch.Tensor) -> None:
        """Note rows of logits [rows, vocab] that are not numbers: then none of a row's is one."""
        arrival = self._streams.bring([logits[:, 0].isnan()])
        step.told.append(Told(arrival, lambda found: step.read_overflows(slots, *found)))

    def _sample(
        self,
        step: TorchPending,
        logits: torch.Tensor,
        samples: Sequence[tuple[int, SampleRow, bool]],  # a row of logits; is it masked?
    ) -> None:
        step.masked += [(row, logits[number].clone()) for number, row, masked in samples if masked]
        plain = [(number, row) for number, row, masked in samples if not masked]
        if not plain:
            return
        if len(plain) < len(logits):
            logits = logits[self._pools.index(np.array([number for number, _ in plain]))]
        self._sample_rows(step, [row for _, row in plain], logits, None)

    def _sample_masked(self, step: TorchPending, masks: np.ndarray) -> None:
        with torch.inference_mode(), self._streams.forward():
            logits = torch.stack([logits for _, logits in step.masked])
            self._sample_rows(step, [row for row, _ in step.masked], logits, masks)

    def _sample_rows(
        self,
        step: TorchPending,
        rows: Sequence[SampleRow],
        logits: torch.Tensor,
        masks: np.ndarray | None,
    ) -> None:
        sampled = self._sampler.sample(logits, rows, masks)
        slots = [row.slot for row in rows]
        self._future_map.stash(self._pools.index(np.array(slots)), sampled.tokens)
        self._future_map.note_written(np.array(slots))
        arrival = self._streams.bring([sampled.tokens])
        step.told.append(Told(arrival, lambda found: step.read_tokens(slots, *found)))
        if sampled.logprobs is not None:
            asked = [slots[row] for row in sampled.asked]
            arrival = self._streams.bring(sampled.logprobs)
            step.told.append(Told(arrival, lambda found: step.read_logprobs(asked, *found)))

    def _num_top_logprobs(self, slot: int) -> int | None:
        admit = self._admitted.get(slot)
        return None if admit is None else admit.params.logprobs

    def _send(self, values: np.ndarray) -> torch.Tensor:
        """To the device, in its own type; the host does not wait."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._decoder.device.type == "cpu":
            return host
        return host.pin_memory().to(self._decoder.device, non_blocking=True)


def _kv(payload: Payload) -> KVPayload:
    assert isinstance(payload, KVPayload)
    return payload


def _state(payload: Payload) -> StatePayload:
    assert isinstance(payload, StatePayload)
    return payload


def _hidden_of(row: PrefillRow) -> torch.Tensor:
    assert row.restore is not None
    payload = row.restore.payloads[Component.HIDDEN][-1]
    assert isinstance(payload, HiddenPayload)
    assert payload.hidden is not None
    return payload.hidden
