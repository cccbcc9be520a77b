"""The MLX backend: executes plans. The one place of this backend that launches device work.

Everything a step writes goes into `mx.async_eval`, what running streams need before what prompts
need; nothing here waits for the device except `MLXPending.wait`. All arrays are made and used by
the engine's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import numpy as np

from pippin.backends.base import (
    Admit,
    DecodeRow,
    PrefillRow,
    Retire,
    StepPlan,
    captured_bytes,
)
from pippin.backends.chunking import grid_blocks, group_chunks
from pippin.backends.mlx.cpu.kernels import Kernels
from pippin.backends.mlx.cpu.malloc import ResidentLimit, has_glibc
from pippin.backends.mlx.cpu.stream_clock import find_stream_clock
from pippin.backends.mlx.device import (
    device_info,
    limit_memory,
    max_buffers,
    on_cpu,
    on_metal,
    wire,
)
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.mlx.prefill import query_blocks
from pippin.backends.mlx.prefill.batch import EXACT, ChunkBatch, PromptState
from pippin.backends.mlx.recurrent.state_taps import StateTaps
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.rows.footprint import Footprint
from pippin.backends.mlx.shapes import Ladder, to_warm_up
from pippin.backends.mlx.step.future_map import FutureMap
from pippin.backends.mlx.step.pending import MLXPending, SampledRows
from pippin.backends.mlx.step.recent_shapes import RecentShapes
from pippin.backends.mlx.step.sampler import Logprobs, Sampler, SampleRow
from pippin.backends.mlx.tree.captures import Captures
from pippin.errors import LoadError
from pippin.types import ModelSpec

# Of what the weights leave:
ACTIVATION_SHARE = 0.1  # activations, and copies on their way
MOST_WARMED_TOKENS = 2048  # of a chunk; larger ones are rare, and take their time anyway
SPARE_SHARE = 1 / 16  # what decode rows hold for nobody: padding, and lines of those who left


class MLXBackend:
    """Slots in, tokens out. Holds what every slot has computed, as prompts and as decode rows."""

    restores_by_reference = False

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int,
        max_len: int | None = None,
        deterministic: bool = False,
        wired: bool = False,
        debug: bool = False,
    ) -> None:
        self._loaded = loaded
        self._wired = wired
        self._deterministic = deterministic
        self._captures = Captures(loaded.layout)
        self._footprint = Footprint(loaded.layout)
        self._future_map = FutureMap(num_slots, debug=debug)
        self._sampler = Sampler(loaded.vocab_size, num_slots)
        self._rows: dict[int, DecodeRows] = {}  # by slot; one for all unless deterministic
        self._shared_rows = self._make_rows()
        self._kernels = Kernels.of(loaded)
        self._decode_forward = DecodeForward(
            loaded.layout,
            loaded.forward,
            compiled=(lambda: False) if deterministic else self._kernels.ready,
        )
        padded = loaded.layout.pads and not on_cpu() and not deterministic
        self._prefill_shapes = Ladder() if padded else EXACT
        # Metal takes ten command buffers, some 500 operations, and holds the host up until it has
        # done the first of them: tokens that are there would wait for most of a prompt.
        self.holds_prompts_back = on_metal()
        self._shapes = RecentShapes()
        self._clock = find_stream_clock()
        self._resident: ResidentLimit | None = None
        self._prompts: dict[int, PromptState] = {}  # slots that have not decoded yet
        self._admitted: dict[int, Admit] = {}
        self._prompt_logprobs: dict[int, list[Logprobs]] = {}
        self.device = device_info()
        self.shapes_to_warm_up = (
            to_warm_up(MOST_WARMED_TOKENS, num_slots) if padded and not debug else []
        )
        self.spec = ModelSpec(
            name=loaded.name,
            vocab_size=loaded.vocab_size,
            max_len=min(loaded.max_len, max_len or loaded.max_len),
            layers=loaded.layout.layer_specs,
            state_taps=loaded.state_taps,
            hidden_bytes=loaded.hidden_bytes,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        num_slots: int,
        dtype: str = "auto",
        max_len: int | None = None,
        deterministic: bool = False,
        builds_kernels: bool = False,
        wired: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> MLXBackend:
        """`builds_kernels`: compile decode steps in the background, for a process that stays.

        `wired`: the weights' memory, on Metal.
        """
        if wired and not on_metal():
            raise LoadError(f"wired: only Metal wires memory, this is {device_info().kind}")
        loaded = load(path, dtype=dtype, deterministic=deterministic, progress=progress)
        backend = cls(
            loaded,
            num_slots=num_slots,
            max_len=max_len,
            deterministic=deterministic,
            wired=wired,
        )
        if builds_kernels and not deterministic:
            backend._kernels.build_in_background(path, dtype)
        return backend

    def launch(self, plan: StepPlan) -> MLXPending:
        if self._resident is not None:
            self._resident.keep()
        self._kernels.check_stop()
        step = MLXPending(plan, self._sample_rows, self._num_top_logprobs, self._clock)
        for retire in plan.retire:
            self._retire(step, retire)
        for admit in plan.admit:
            self._admit(admit)
        for rows, decodes in self._decode_groups(plan.decode):
            self._decode(step, rows, decodes)
        if plan.decode:  # the device has these to do while the prompts' graph is being built
            self._launch(step)
        for restored in self._restored_groups([row for row in plan.prefill if not len(row.tokens)]):
            self._sample_restored(step, restored)
        for group in self._prefill_groups([row for row in plan.prefill if len(row.tokens)]):
            self._prefill(step, group)
        if plan.prefill or not plan.decode:
            self._sample(step)
            if not (plan.decode and self.holds_prompts_back):  # else `dispatch` hands them over
                step.launch()
        return step

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """A restored prefix is copied into its row: `num_borrowed` changes nothing."""
        return self._footprint.row_bytes(num_tokens)

    def transient_bytes(self, plan: StepPlan) -> int:
        return captured_bytes(self.spec, plan)

    def limit_memory(self, budget_bytes: int) -> int:
        used = self.memory_used()
        left = limit_memory(budget_bytes, used) - used
        if self._wired:
            wire(used)
        if on_cpu() and has_glibc():
            self._resident = ResidentLimit(max(budget_bytes - used, 0))
        self._shared_rows.spare.max_bytes = max(left, 0) * SPARE_SHARE
        query_blocks.LIMIT.fit(max(left, 0) * ACTIVATION_SHARE)
        left = int(left * (1.0 - ACTIVATION_SHARE - SPARE_SHARE))
        buffers = max_buffers()
        return left if buffers is None else min(left, buffers * self._captures.least_buffer_bytes)

    @property
    def loaded(self) -> LoadedModel:
        return self._loaded

    def make_way(self, *, busy: bool) -> None:
        self._kernels.give_way(busy=busy)

    def memory_used(self) -> int:
        return int(mx.get_active_memory())

    def close(self) -> None:
        self._kernels.close()
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        self._rows.clear()
        self._shared_rows = self._make_rows()
        self._prompts.clear()
        mx.clear_cache()

    # ---- slots -----------------------------------------------------------------------------

    def _admit(self, admit: Admit) -> None:
        self._admitted[admit.slot] = admit
        self._prompts[admit.slot] = PromptState()
        self._sampler.admit(admit)

    def _retire(self, step: MLXPending, retire: Retire) -> None:
        slot = retire.slot
        if retire.captures:
            for capture in self._captures.of_slot(retire, self._held(slot, retire.start)):
                step.keep(capture)
        if slot in self._rows:
            self._rows.pop(slot).leave(slot)
        self._prompts.pop(slot, None)
        self._prompt_logprobs.pop(slot, None)
        self._sampler.retire(slot)
        self._admitted.pop(slot, None)  # a slot whose launch failed may hold nothing

    def _held(self, slot: int, start: int) -> PromptState:
        """What the slot has computed from `start` on, wherever it lies."""
        rows = self._rows.get(slot)
        if rows is None:
            return self._prompts[slot]
        return PromptState(rows.rows[slot].length, rows.kv_of(slot, start), rows.states_of(slot))

    # ---- prefill ---------------------------------------------------------------------------

    def _prefill_groups(self, chunks: Sequence[PrefillRow]) -> list[list[PrefillRow]]:
        if self._deterministic:  # every block of the absolute grid by itself, always
            return [[block] for chunk in chunks for block in grid_blocks(chunk)]
        pads = self._loaded.layout.pads
        return group_chunks(chunks, self._wants_prompt_logprobs, pads=pads, cpu=on_cpu())

    def _prefill(self, step: MLXPending, chunks: Sequence[PrefillRow]) -> None:
        states = [self._restored(chunk) for chunk in chunks]
        whole = self._wants_prompt_logprobs(chunks[0])
        batch = ChunkBatch(
            self._loaded.layout,
            [chunk.tokens for chunk in chunks],
            states,
            EXACT if whole else self._prefill_shapes,
        )
        step.note_prefill(is_new=self._shapes.add(batch.shape))
        head = self._loaded.head
        head.positions = None if whole else mx.array(batch.last_positions[:, None])
        taps = any(at != chunk.end for chunk in chunks for at in chunk.checkpoints)
        with StateTaps(self._loaded.layout) if taps else nullcontext() as tapped:
            logits = self._loaded.forward(batch.tokens, batch.caches)
        head.positions = None
        hidden = self._loaded.take_hidden()
        if whole:
            self._note_prompt_logprobs(step, chunks[0], logits[0])
            logits = logits[:, -1:]
        elif logits.shape[1] != 1:  # a head that could not be told to choose
            logits = mx.take_along_axis(logits, mx.array(batch.last_positions)[:, None, None], 1)
        step.check(np.array([chunk.slot for chunk in chunks]), logits[: len(chunks), -1])
        batch.advance()
        new_kv = batch.new_kv()
        for row, (chunk, prompt) in enumerate(zip(chunks, states, strict=True)):
            if chunk.captures:
                step.keep(self._captures.of_chunk(chunk, row, new_kv, prompt, tapped, hidden))
            if chunk.samples:
                self._sample_prompt(step, chunk, logits[row])
            step.written += prompt.arrays()

    def _restored_groups(self, rows: Sequence[PrefillRow]) -> list[Sequence[PrefillRow]]:
        if self._deterministic:  # a head's product of several rows may round otherwise
            return [[row] for row in rows]
        return [rows] if rows else []

    def _sample_restored(self, step: MLXPending, rows: Sequence[PrefillRow]) -> None:
        """Prompts that are restored whole: the head is all that is computed of them.

        Their tokens are launched first: nobody who waits for them needs the rows.
        """
        hidden = mx.concatenate([self._captures.hidden_of(row) for row in rows], axis=0)
        logits = self._loaded.logits_after(hidden)
        step.check(np.array([row.slot for row in rows]), logits[:, -1])
        for number, row in enumerate(rows):
            self._sample_prompt(step, row, logits[number])
        self._launch(step)
        for row in rows:
            step.written += self._restored(row).arrays()

    def _sample_prompt(self, step: MLXPending, row: PrefillRow, logits: mx.array) -> None:
        """The token after a prompt, or after what is known of a reply that goes on."""
        sample = SampleRow(row.slot, len(self._admitted[row.slot].reply))
        step.to_sample.add(sample, logits, row.masked)

    def _restored(self, chunk: PrefillRow) -> PromptState:
        prompt = self._prompts[chunk.slot]
        if chunk.restore is not None:
            self._captures.restore(prompt, chunk.restore)
        assert prompt.length == chunk.start, f"slot {chunk.slot}: chunks must follow each other"
        return prompt

    def _wants_prompt_logprobs(self, chunk: PrefillRow) -> bool:
        return self._admitted[chunk.slot].params.prompt_logprobs is not None

    def _note_prompt_logprobs(self, step: MLXPending, chunk: PrefillRow, logits: mx.array) -> None:
        """Logits [n, vocab] of positions start.. are for tokens start + 1..; the last is drawn."""
        admit = self._admitted[chunk.slot]
        targets = admit.prompt[chunk.start + 1 : chunk.end + 1]
        found = self._prompt_logprobs.setdefault(chunk.slot, [])
        if len(targets):
            top = admit.params.prompt_logprobs or 0
            scored = self._sampler.logprobs_of_prompt(
                logits[: len(targets)], mx.array(targets), top
            )
            found.append(scored)
            step.written += list(scored)
        if chunk.samples:
            step.prompt_logprobs[chunk.slot] = self._prompt_logprobs.pop(chunk.slot)

    # ---- decode ----------------------------------------------------------------------------

    def _decode_groups(
        self, decodes: Sequence[DecodeRow]
    ) -> list[tuple[DecodeRows, Sequence[DecodeRow]]]:
        """All rows in one forward; or each in its own, so that no row's width or place matters."""
        if not self._deterministic:
            return [(self._shared_rows, decodes)] if decodes else []
        return [(self._rows.get(d.slot) or self._make_rows(), [d]) for d in decodes]

    def _make_rows(self) -> DecodeRows:
        return DecodeRows(self._loaded.layout, self._loaded.attend_packed)

    def _decode(self, step: MLXPending, rows: DecodeRows, decodes: Sequence[DecodeRow]) -> None:
        joining = [d.slot for d in decodes if d.slot not in self._rows]
        self._rows |= dict.fromkeys(joining, rows)
        rows.join(
            [(slot, self._prompts.pop(slot)) for slot in joining],
            {slot: self._admitted[slot].prompt for slot in joining},
        )
        slots, logits = rows.advance(
            [d.slot for d in decodes], self._future_map.resolve, self._decode_forward
        )
        ran = self._decode_forward.last
        is_new = self._shapes.add(ran.shape)
        step.note_decode(rows.mains.num_groups, is_new=is_new, compiled=ran.compiled)
        step.written += rows.arrays()
        step.check(slots, logits)
        by_slot = {d.slot: d for d in decodes}
        sample_rows, masked = [], {}
        for index, slot in enumerate(slots.tolist()):
            decode = by_slot.get(slot)
            if decode is None or not decode.samples:
                sample_rows.append(SampleRow(0, 0))
                continue
            generated = decode.position + 1 - len(self._admitted[slot].prompt)
            row = SampleRow(slot, generated)
            if decode.masked:
                masked[index] = row
            sample_rows.append(SampleRow(0, 0) if decode.masked else row)
        step.to_sample.add_batch(sample_rows, logits)
        for index, row in masked.items():
            step.to_sample.add(row, logits[index : index + 1], masked=True)
        for decode in decodes:
            if decode.checkpoint and rows.states:
                step.keep(self._captures.of_decode(decode, rows))

    # ---- sampling --------------------------------------------------------------------------

    def _launch(self, step: MLXPending) -> None:
        """Sample what needs no mask, and hand the device all that is written and not yet there."""
        self._sample(step)
        step.launch()

    def _sample(self, step: MLXPending) -> None:
        rows, logits = step.to_sample.take_unmasked()
        if logits is not None:
            self._sample_rows(step, rows, logits, None)

    def _sample_rows(
        self,
        step: MLXPending,
        rows: Sequence[SampleRow],
        logits: mx.array,
        masks: Mapping[int, np.ndarray] | None,
    ) -> None:
        sampled = self._sampler.sample(logits, rows, masks)
        slots = np.array([row.slot for row in rows], dtype=np.int32)
        self._future_map.stash(slots, sampled.tokens)
        step.sampled.append(SampledRows(slots, sampled))
        step.written += [*sampled.arrays, self._future_map.array]

    def _num_top_logprobs(self, slot: int) -> int | None:
        admit = self._admitted.get(slot)
        return None if admit is None else admit.params.logprobs
