"""The torch backend: executes plans. The one place of this backend that launches device work.

Pools are written in place, in the order of launches, on the forward stream. Nothing here waits for
the device except `TorchPending.wait`; on a CPU `launch` itself computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pippin.backends.base import Retire, StepPlan, WarmUpShape, captured_bytes
from pippin.backends.torch.config import suit_kernels
from pippin.backends.torch.decodes import Decodes
from pippin.backends.torch.device import device_info
from pippin.backends.torch.forward import ChunkForward, PlainForward
from pippin.backends.torch.graphs.capture import CudaGraphs, Recorder
from pippin.backends.torch.graphs.replays import Replays
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.pools.arena import MOST_MOVED_BYTES
from pippin.backends.torch.pools.fingerprints import Fingerprints
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.pools.transfers import Transfers, host_memory, payload_arrays
from pippin.backends.torch.prompts import Prompts
from pippin.backends.torch.step.captures import Captures
from pippin.backends.torch.step.draws import Draws
from pippin.backends.torch.step.future_map import FutureMap
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import Told, TorchPending
from pippin.backends.torch.step.rooms import ROOM_ROWS, ROOMS
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.widths import WIDTHS, width_for
from pippin.backends.torch.streams import make_streams
from pippin.cache.disk.entries import ArraySpec, Bytes
from pippin.types import Component, ModelSpec

if TYPE_CHECKING:
    from pippin.backends.torch.graphs.chunk_graphs import ChunkGraphs
    from pippin.backends.torch.graphs.decode_steps import DecodeSteps

ACTIVATION_SHARE = 0.1  # of what the weights leave
# Chunks of prompts, as far as there is room (`step/rooms.py`), are captured where decode steps are.
# Where that fails this says so and goes on without; False: they are launched kernel by kernel.
CHUNK_GRAPHS = True
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
        recorder: Recorder | None = None,
        chunk_graphs: bool = CHUNK_GRAPHS,
        fingerprints: bool = False,
        debug: bool = False,
    ) -> None:
        """`kernels`: Triton's. None: on GPUs, for shapes that they can take.

        `recorder`: captures what is made of them. None: on GPUs CUDA graphs do.
        `fingerprints`: of what the tree holds; compared when it is used.
        """
        decoder = loaded.decoder
        self._decoder = decoder
        self._num_slots = num_slots
        self._deterministic = deterministic
        self._layout = PoolLayout(decoder.shape, decoder.dtype)
        self._streams = make_streams(decoder.device, decoder.dtype)
        self._slots = Slots(num_slots, decoder.shape.vocab_size, self._send)
        if kernels is None:
            kernels = decoder.device.type == "cuda" and suit_kernels(decoder.shape)
        self._uses_kernels = kernels
        self._takes_fingerprints = fingerprints
        self._recorder = recorder
        is_captured = kernels and (recorder is not None or decoder.device.type == "cuda")
        # Scored or not, alone or in company: there a chunk runs the same way each time.
        self._has_chunk_graphs = chunk_graphs and is_captured and not deterministic
        self.device = device_info(decoder.device)
        self.shapes_to_warm_up: Sequence[WarmUpShape] = self._shapes_to_warm_up()
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
        fingerprints: bool = False,
        progress: Callable[[str], None] = lambda _: None,
    ) -> TorchBackend:
        with torch.inference_mode():
            loaded = load(path, dtype=dtype, max_len=max_len, progress=progress)
        return cls(
            loaded, num_slots=num_slots, deterministic=deterministic, fingerprints=fingerprints
        )

    def launch(self, plan: StepPlan) -> TorchPending:
        step = TorchPending(
            plan, self._sample_masked, self._slots.num_top_logprobs, self._fingerprints
        )
        step.dispatched = perf_counter()
        try:
            with torch.inference_mode(), self._streams.forward():
                self._execute(step, plan)
        except BaseException:
            step.discard()  # nobody will
            raise
        return step

    def _execute(self, step: TorchPending, plan: StepPlan) -> None:
        sent = self._transfers.send(plan.load)
        for retire in plan.retire:
            self._retire(step, retire)
        for admit in plan.admit:
            self._slots.admit(admit)
        self._decodes.run(step, plan.decode)
        self._prompts.run(step, plan.prefill)
        for spill in plan.spill:
            spilled = self._transfers.spill(spill)
            step.spilled.append(spilled)
            if self._fingerprints is not None:
                self._fingerprints.compare(plan.step, spill.payloads, spilled.note_damage)
        if plan.load:
            step.loaded += self._transfers.load(plan.load, sent)
            # Whoever takes the step in may use what it was loaded from for something else.
            step.told.append(Told(self._streams.bring([]), lambda _: None))
        if self._fingerprints is not None:
            made = [payload for capture in step.captures for payload in capture.payloads]
            self._fingerprints.take(plan.step, [*made, *step.loaded])
        self._pools.arena.compact(MOST_MOVED_BYTES)

    def _retire(self, step: TorchPending, retire: Retire) -> None:
        if retire.captures:
            step.captures += self._captures.of_slot(retire)
        self._rows.retire(retire.slot)
        self._slots.retire(retire.slot)
        self._prompts.retire(retire.slot)

    def _sample_masked(self, step: TorchPending, masks: np.ndarray) -> None:
        with torch.inference_mode(), self._streams.forward():
            self._draws.sample_masked(step, masks)

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
        """While requests run, graphs are captured one at a time (`replays.py`)."""
        for replays in self._replays():
            replays.busy = busy

    def close(self) -> None:
        self._slots.clear()

    def _make_pools(self, capacity_bytes: int) -> None:
        assert not self._slots, "pools are made before requests run"
        self._pools = Pools(self._layout, capacity_bytes, self._decoder.device)
        self._rows = Rows(self._pools, self._num_slots, self.spec.max_len)
        self._transfers = Transfers(self._pools, self._streams)
        self._captures = Captures(self._pools, self._rows)
        self._fingerprints = self._make_fingerprints() if self._takes_fingerprints else None
        self._draws = Draws(self._slots, self._future_map, self._pools, self._streams)
        parts = StepParts(
            self._pools,
            self._rows,
            self._captures,
            self._slots,
            self._future_map,
            self._draws,
            self._streams,
        )
        plain = PlainForward(self._decoder, self._pools)
        forward: ChunkForward = plain
        steps: DecodeSteps | None = None
        graphs: ChunkGraphs | None = None
        if self._uses_kernels:
            forward, steps, graphs = self._make_kernels()
        self._decodes = Decodes(parts, plain, steps, deterministic=self._deterministic)
        self._prompts = Prompts(
            parts,
            forward,
            graphs,
            deterministic=self._deterministic,
            max_tokens=self.device.prefill_tokens,
        )

    # ---- kernels ---------------------------------------------------------------------------

    def _replays(self) -> Iterator[Replays[Any, Any]]:
        """What is captured, if anything is."""
        if self._decodes.steps is not None and self._decodes.steps.replays is not None:
            yield self._decodes.steps.replays
        if self._prompts.graphs is not None:
            yield self._prompts.graphs.replays

    def _make_kernels(self) -> tuple[ChunkForward, DecodeSteps, ChunkGraphs | None]:
        from pippin.backends.torch.graphs.chunk_graphs import (
            ChunkGraphs,  # triton is not everywhere
        )
        from pippin.backends.torch.graphs.decode_steps import DecodeSteps
        from pippin.backends.torch.kernels.decode import DecodeKernels
        from pippin.backends.torch.kernels.prefill import ChunkKernels
        from pippin.backends.torch.kernels.prompt import PromptKernels

        decoder, pools, table = self._decoder, self._pools, self._rows.table
        future, recorder = self._future_map.tokens, self._recorder
        if recorder is None and decoder.device.type == "cuda":
            recorder = CudaGraphs(decoder.device)
        decode = DecodeKernels(decoder, pools, table)
        most_rows = max(width_for(self._num_slots), *ROOM_ROWS)
        logits = torch.empty(
            most_rows, decoder.shape.vocab_size, dtype=decoder.dtype, device=decoder.device
        )
        steps = DecodeSteps(decode, future, self._layout.waste_cell, recorder, logits)
        graphs = None
        if recorder is not None and self._has_chunk_graphs:
            prompt = PromptKernels(decoder, pools, table)
            graphs = ChunkGraphs(prompt, future, self._layout, recorder, logits)
        return ChunkKernels(decoder, pools), steps, graphs

    def _make_fingerprints(self) -> Fingerprints:
        if not self._uses_kernels:
            return Fingerprints(self._pools, self._streams)
        from pippin.backends.torch.kernels.word_sums import sum_words

        return Fingerprints(self._pools, self._streams, sum_words)

    def _shapes_to_warm_up(self) -> list[WarmUpShape]:
        if not self._uses_kernels:
            return []
        widths = [width for width in WIDTHS if width <= self._num_slots]
        shapes = [WarmUpShape(width, num_tokens=1, num_steps=1) for width in widths]
        if self._has_chunk_graphs:
            filled = ((room, room.least_rows) for room in ROOMS)
            shapes += [
                WarmUpShape(num_rows, num_tokens=room.num_tokens // num_rows)
                for room, num_rows in filled
                if num_rows <= self._num_slots
            ]
        return shapes

    def _send(self, values: np.ndarray) -> torch.Tensor:
        """To the device, in its own type; the host does not wait."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._decoder.device.type == "cpu":
            return host
        return host.pin_memory().to(self._decoder.device, non_blocking=True)
