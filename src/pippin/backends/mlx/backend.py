"""The MLX backend: executes plans. The one place of this backend that launches device work.

Everything a step writes goes into `mx.async_eval`, what running streams need before what prompts
need; nothing here waits for the device except `MLXPending.wait`. All arrays are made and used by
the engine's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from pippin.backends.base import (
    Admit,
    Capture,
    Load,
    PrefillRow,
    Retire,
    Spill,
    StepPlan,
    captured_bytes,
)
from pippin.backends.fallbacks import Fallbacks, noted_in
from pippin.backends.mlx.cpu.operations import compile_without_fusing, running_ahead
from pippin.backends.mlx.device import (
    device_info,
    limit_memory,
    max_buffers,
    on_cpu,
    on_metal,
    wire,
)
from pippin.backends.mlx.drafts.draft_model import load_draft_model
from pippin.backends.mlx.drafts.draft_rows import find_draft_layers
from pippin.backends.mlx.load import LoadedModel, load
from pippin.backends.mlx.payloads.captures import Captures
from pippin.backends.mlx.payloads.packing import Packer, Transfers
from pippin.backends.mlx.payloads.payload import MLXFingerprints
from pippin.backends.mlx.prefill import query_blocks
from pippin.backends.mlx.prefill.batch import EXACT, PromptState
from pippin.backends.mlx.prefill.prompts import Prompts
from pippin.backends.mlx.rows.decodes import Decodes
from pippin.backends.mlx.rows.memory import Footprint
from pippin.backends.mlx.shapes import Ladder, to_warm_up
from pippin.backends.mlx.step.pending import MLXPending, RecentShapes
from pippin.backends.mlx.step.sampler import ARRAYS, MLXSampler
from pippin.backends.step.drafts import affordable_depth
from pippin.backends.step.pending import Sampling
from pippin.backends.step.runner import StepRunner
from pippin.backends.step.slots import SlotTable
from pippin.cache.entries import ArraySpec, Bytes
from pippin.errors import LoadError
from pippin.types import Component, ModelSpec, Payload

# Raise it with every change to what is computed for KV, states or hidden vectors, if only in the
# last bit: a kernel, a fix, another order. What is on disk from before is not read then.
ARITHMETIC_VERSION = 4
# Of what the weights leave:
ACTIVATION_SHARE = 0.1  # activations, and copies on their way
MOST_WARMED_TOKENS = 2048  # of a chunk; larger ones are rare, and take their time anyway
SPARE_SHARE = 1 / 16  # decode rows that serve no request: padding, and rows that were left


class MLXBackend(StepRunner[MLXPending]):
    """Slots in, tokens out. Holds what every slot has computed, as prompts and as decode rows."""

    restores_by_reference = False
    warm_up_seconds = 2.0

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int,
        max_len: int | None = None,
        deterministic: bool = False,
        wired: bool = False,
        fingerprints: bool = False,
        max_depth: int = 0,
        debug: bool = False,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        """`fingerprints`: of what the tree holds; compared when it is used. `max_depth`: of drafts,
        where this model's rows can verify some. `fallbacks`: noted when the model was loaded."""
        self.fallbacks = fallbacks or Fallbacks()
        self._loaded = loaded
        self._wired = wired
        own = (loaded.model, loaded.mtp_head, None if loaded.draft is None else loaded.draft.model)
        parts = [part.parameters() for part in own if part is not None]
        self._num_weights = len(tree_flatten(parts))
        self._packer = packer = Packer(loaded.layout)
        self._captures = Captures(loaded.layout, packer)
        self._transfers = Transfers(
            loaded.layout, packer, loaded.hidden_bytes, loaded.head.dtype or loaded.dtype
        )
        self._fingerprints = MLXFingerprints() if fingerprints else None
        sampler = MLXSampler(loaded.vocab_size, num_slots, safe=loaded.safe)
        self._slots = SlotTable(num_slots, sampler)
        self._shapes = RecentShapes()
        may_compile = loaded.layout.compiles and not (deterministic or loaded.safe)
        self.steps_are_compiled = may_compile and compile_without_fusing()
        with loaded.operating():
            self._decodes = Decodes(
                loaded,
                self._captures,
                self._slots,
                num_slots=num_slots,
                max_depth=max_depth,
                seen=self._shapes,
                compiled=self.steps_are_compiled,
                deterministic=deterministic,
                debug=debug,
            )
        self._sampling = Sampling(ARRAYS, self._slots, self._decodes.future_map)
        self.max_depth = self._decodes.max_depth
        self.drafts_itself = self._decodes.drafts_itself
        self._footprint = Footprint(loaded.layout, self.max_depth)
        padded = loaded.layout.pads and not on_cpu() and not deterministic
        # Metal takes ten command buffers, some 500 operations, and holds the host up until it has
        # done the first of them: tokens that are there would wait for most of a prompt.
        self.holds_prompts_back = on_metal()
        self._prompts = Prompts(  # slots that have not decoded yet
            loaded,
            self._captures,
            self._slots,
            shapes=Ladder() if padded else EXACT,
            seen=self._shapes,
            deterministic=deterministic,
        )
        self.device = device_info()
        self.shapes_to_warm_up = (
            to_warm_up(MOST_WARMED_TOKENS, num_slots) if padded and not debug else []
        )
        self.spec = ModelSpec(
            name=loaded.name,
            vocab_size=loaded.vocab_size,
            max_len=max_len or loaded.max_len,
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
        safe: bool = False,
        wired: bool = False,
        fingerprints: bool = False,
        max_depth: int = 0,
        mtp: bool = False,
        draft: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> MLXBackend:
        """`wired`: the weights' memory, on Metal. `mtp`: the checkpoint's head drafts, where it has
        one. `draft`: the checkpoint of a draft model."""
        if wired and not on_metal():
            raise LoadError(f"wired: only Metal wires memory, this is {device_info().kind}")
        fallbacks = Fallbacks()
        with noted_in(fallbacks):
            loaded = load(path, dtype=dtype, safe=safe, mtp=mtp, progress=progress)
            if draft is not None and max_depth and not deterministic:
                progress("loading the draft model")
                loaded = replace(loaded, draft=load_draft_model(draft, dtype, safe=safe))
        return cls(
            loaded,
            num_slots=num_slots,
            max_len=max_len,
            deterministic=deterministic,
            wired=wired,
            fingerprints=fingerprints,
            max_depth=depth_within(loaded, max_depth, deterministic=deterministic),
            fallbacks=fallbacks,
        )

    def launch(self, plan: StepPlan) -> MLXPending:
        step = MLXPending(plan=plan, sampling=self._sampling, fingerprints=self._fingerprints)
        with self._loaded.operating():
            self.execute(step, plan)
        return step

    # ---- a step ----------------------------------------------------------------------------

    def _begin(self, step: MLXPending, plan: StepPlan) -> None:
        if self._fingerprints is not None:
            self._fingerprints.begin()

    def _captured(self, step: MLXPending, retire: Retire) -> Iterator[Capture]:
        held = self._held(retire.slot, retire.start, retire.end)
        return self._captures.of_slot(retire, held)

    def _free(self, step: MLXPending, slot: int) -> None:
        self._decodes.leave(slot)
        self._prompts.drop(slot)
        self._slots.retire(slot)

    def _start(self, step: MLXPending, admit: Admit) -> None:
        self._prompts.start(admit.slot)
        self._slots.admit(admit)

    def _run(self, step: MLXPending, plan: StepPlan) -> None:
        drafter = self._decodes.drafter
        if drafter is not None:
            drafter.begin(plan)
        for chunk in plan.prefill:
            if chunk.slot in self._decodes.rows:
                self._leave_rows(chunk)
        self._decodes.run(step, plan.decode, self._prompts)
        if plan.decode:  # the device has these to do while the prompts' graph is being built
            step.sample_added()
            with running_ahead(sum(1 + row.depth for row in plan.decode)):
                step.launch()
        self._prefill(step, plan.prefill)
        if plan.prefill or not plan.decode:
            step.sample_added()
            self._decodes.draft_first(step, self._prompts.take_to_draft())
            if not (plan.decode and self.holds_prompts_back):  # else `dispatch` hands them over
                step.launch()
        if drafter is not None:
            drafter.note_sampled(step)

    def _gathered(self, spill: Spill) -> list[mx.array]:
        return self._transfers.gathered(spill)

    def _loaded_payloads(self, step: MLXPending, loads: Sequence[Load]) -> Iterator[Payload]:
        return map(self._transfers.load, loads)

    def _finish(self, step: MLXPending, plan: StepPlan) -> None:
        held_back = plan.decode and plan.prefill and self.holds_prompts_back
        if (plan.spill or plan.load) and not held_back:
            step.launch()

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        return self._transfers.payload_arrays(component, num_tokens)

    def host_memory(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, dtype=np.uint8)

    def _prefill(self, step: MLXPending, chunks: Sequence[PrefillRow]) -> None:
        prompts = self._prompts
        for whole in prompts.restored_groups([row for row in chunks if not len(row.tokens)]):
            prompts.sample_restored(step, whole)
            step.sample_added()
            step.launch()  # these tokens do not need the rows
            prompts.restore(step, whole)
        for group in prompts.groups([row for row in chunks if len(row.tokens)]):
            prompts.run(step, group)

    @property
    def arithmetic(self) -> str:
        return f"mlx {ARITHMETIC_VERSION}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """A restored prefix is copied into its row: `num_borrowed` changes nothing."""
        drafter = self._decodes.drafter
        return self._footprint.row_bytes(num_tokens) + (0 if drafter is None else drafter.row_bytes)

    def transient_bytes(self, plan: StepPlan) -> int:
        return captured_bytes(self.spec, plan)

    def limit_memory(self, budget_bytes: int) -> int:
        used = self.memory_used()
        left = limit_memory(budget_bytes, used) - used
        if self._wired:
            wire(used)
        self._decodes.shared_rows.spare.max_bytes = max(left, 0) * SPARE_SHARE
        query_blocks.LIMIT.fit(max(left, 0) * ACTIVATION_SHARE)
        self._prompts.fit(max(left, 0) * ACTIVATION_SHARE)
        spare, left = left * SPARE_SHARE, int(left * (1.0 - ACTIVATION_SHARE - SPARE_SHARE))
        buffers, longest = max_buffers(), self.device.max_buffer_bytes
        if buffers is not None:
            left = min(left, buffers * self._packer.least_buffer_bytes)
        return left if longest is None else self._footprint.in_arrays_of(longest, left, spare)

    @property
    def loaded(self) -> LoadedModel:
        return self._loaded

    def make_way(self, *, busy: bool) -> None:
        """It has no work of its own."""

    def memory_used(self) -> int:
        return int(mx.get_active_memory())

    def memory_parts(self) -> dict[str, int]:
        """One allocator has them all."""
        return {}

    def buffers_used(self) -> int:
        held = len(self._decodes.arrays()) + len(self._prompts.arrays())
        return self._num_weights + held + self._packer.buffers.num_live

    def close(self) -> None:
        with self._loaded.operating():
            self._decodes.clear()
        self._prompts.clear()
        mx.clear_cache()

    def _held(self, slot: int, start: int, end: int) -> PromptState:
        """What the slot has computed of tokens [start, end), wherever it lies."""
        in_rows = slot in self._decodes.rows
        return self._decodes.held(slot, start, end) if in_rows else self._prompts[slot]

    def _leave_rows(self, chunk: PrefillRow) -> None:
        """A chunk of a reply is run as a prompt's is; the slot joins the others again later."""
        held = self._held(chunk.slot, 0, chunk.start)
        self._decodes.leave(chunk.slot)
        self._prompts.take_back(chunk.slot, held)
        self._slots.sampler.count(chunk.slot, chunk.tokens[1:])  # the first was, when drawn


def draft_bytes(loaded: LoadedModel, max_depth: int) -> int:
    """Of a row that may have so many."""
    without, own = (Footprint(loaded.layout, depth).line_bytes for depth in (0, max_depth))
    head = loaded.mtp_head
    return own - without + (0 if head is None else head.ring_shape(max_depth).nbytes)


def depth_within(loaded: LoadedModel, max_depth: int, *, deterministic: bool) -> int:
    with loaded.operating():
        layers = find_draft_layers(loaded.model, loaded.layout, deterministic=deterministic)
    if isinstance(layers, str):  # then rows verify none, and say why
        return max_depth
    row_bytes = Footprint(loaded.layout).row_bytes
    return affordable_depth(max_depth, lambda depth: draft_bytes(loaded, depth), row_bytes)
