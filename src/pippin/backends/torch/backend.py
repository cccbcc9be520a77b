"""The torch backend: counts bytes, keeps a budget, and launches what `runner.py` executes.

Nothing here waits for the device except `TorchPending.wait`; on a CPU `launch` itself computes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from pippin.backends.base import StepPlan, WarmUpShape, captured_bytes
from pippin.backends.fallbacks import Fallbacks
from pippin.backends.step.drafts import NOT_DETERMINISTIC, affordable_depth
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.config import lacks_draft_kernels, suit_kernels
from pippin.backends.torch.device import arrays_on, device_info, to_device
from pippin.backends.torch.forwards import Ways
from pippin.backends.torch.graphs.capture import CudaGraphs
from pippin.backends.torch.kernels import checks
from pippin.backends.torch.kernels.checks import Agreed
from pippin.backends.torch.load import LoadedModel, load
from pippin.backends.torch.memory import (
    CudaMeter,
    LargestSteps,
    MemoryShares,
    MemoryUse,
    draft_bytes,
    largest_chunk,
    run_largest_chunk,
    run_largest_sampling,
)
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.payloads import host_memory, payload_arrays
from pippin.backends.torch.runner import Runner
from pippin.backends.torch.step.filters import in_top_p_by
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.streams import make_streams
from pippin.cache.entries import ArraySpec, Bytes
from pippin.errors import OutOfMemory
from pippin.types import Component

logger = logging.getLogger(__name__)

# Chunks of prompts, as far as there is room (`step/words.py`), are captured where decode steps are.
# If that fails a warning is logged and they are launched; False: they always are.
CHUNK_GRAPHS = True
DEFAULT_POOL_BYTES = 2 << 30  # where no budget is set; a CPU commits only what is used

# Raise it with every change to what is computed for KV, states or hidden vectors, if only in the
# last bit: a kernel, a fix, another order. What is on disk from before is not read then.
ARITHMETIC_VERSION = 6


class TorchBackend:
    """Slots in, tokens out."""

    restores_by_reference = True
    warm_up_seconds = math.inf  # a kernel to compile takes longer than a request may wait

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_slots: int,
        deterministic: bool = False,
        pool_bytes: int | None = DEFAULT_POOL_BYTES,
        kernels: bool | None = None,
        recorder: CudaGraphs | None = None,
        chunk_graphs: bool = CHUNK_GRAPHS,
        prefill_tokens: int | None = None,
        meter: CudaMeter | None = None,
        fingerprints: bool = False,
        max_depth: int = 0,
        debug: bool = False,
    ) -> None:
        """`pool_bytes`: None: `limit_memory` makes pools.
        `kernels`: Triton's. None: on GPUs, for shapes that they can take, if they agree there with
        plain operations.
        `prefill_tokens`: of the largest step. None: what suits the device.
        `meter`: of the device's memory. None: there is one on GPUs.
        `recorder`: captures what is made of them. None: on GPUs CUDA graphs do.
        `fingerprints`: of what the tree holds; compared when it is used.
        `max_depth`: drafts that a row can verify. None if `deterministic`: a token's numbers would
        depend on how many run beside it.
        """
        if deterministic and max_depth:
            logger.warning("no drafts are verified: %s", NOT_DETERMINISTIC)
        self.max_depth = 0 if deterministic else max_depth
        self._decoder = decoder = loaded.decoder
        self._draft = loaded.draft
        has_drafter = decoder.mtp is not None or loaded.draft is not None
        self.drafts_itself = self.max_depth if has_drafter else 0
        weights = decoder.nbytes + (0 if loaded.draft is None else loaded.draft.nbytes)
        self._layout = PoolLayout(decoder.shape, decoder.dtype)
        self._streams = make_streams(decoder.device, decoder.dtype)
        self.device = device_info(decoder.device, prefill_tokens)
        on_cuda = decoder.device.type == "cuda"
        self.fallbacks = Fallbacks()
        agreed = self._agreed(loaded, num_slots, kernels)
        kernels = agreed.steps
        send = partial(to_device, device=decoder.device)
        self._slots = Slots(num_slots, decoder.shape.vocab_size, send, in_top_p_by(kernels))
        is_captured = kernels and (recorder is not None or on_cuda)
        # Scored or not, alone or in company: with `deterministic` a chunk runs the same way always.
        chunk_graphs = chunk_graphs and agreed.chunks and is_captured and not deterministic
        self._ways = Ways(
            num_slots=num_slots,
            max_len=loaded.max_len,
            prefill_tokens=self.device.prefill_tokens,
            deterministic=deterministic,
            kernels=kernels,
            chunk_kernels=agreed.chunks,
            draft_kernels=agreed.drafts,
            recorder=recorder,
            chunk_graphs=chunk_graphs,
            mixed=chunk_graphs and num_slots > 1 and not self._layout.num_recurrent_layers,
            fingerprints=fingerprints,
            max_depth=self.max_depth,
            drafts_itself=self.drafts_itself > 0,
        )
        self._meter = CudaMeter(decoder.device) if meter is None and on_cuda else meter
        self._memory = MemoryUse(weights)
        self._runner: Runner | None = None
        self._is_limited = False  # a budget says how large the pools are
        self.shapes_to_warm_up: Sequence[WarmUpShape] = self._ways.shapes_to_warm_up()
        self.spec = self._layout.model_spec(loaded.name, loaded.max_len)
        self._shares = MemoryShares(
            self._layout,
            weights=weights,
            drafts=num_slots * draft_bytes(decoder, loaded.draft, self._layout, self.max_depth),
            num_slots=num_slots,
            max_len=loaded.max_len,
            prefill_tokens=self.device.prefill_tokens,
            num_graphs=self._ways.num_graphs(),
            meter=self._meter,
        )
        with torch.inference_mode(), self._streams.forward():
            self._future_map = FutureMap(
                arrays_on(decoder.device), num_slots, max_depth=self.max_depth, debug=debug
            )
        if pool_bytes is not None:
            self._make_runner(pool_bytes)

    def _agreed(self, loaded: LoadedModel, num_slots: int, kernels: bool | None) -> Agreed:
        """Which kernels are used; why others are not is noted."""
        decoder, on_cuda = loaded.decoder, loaded.decoder.device.type == "cuda"
        if kernels is False or (kernels is None and not on_cuda):
            return checks.NONE
        without = None
        if self.max_depth and (without := lacks_draft_kernels(decoder.shape)) is not None:
            self.fallbacks.note(
                "plain operations are used for steps with drafts",
                f"there are no kernels for drafts of {decoder.shape.model_type}'s {without}",
            )
        drafts = self.max_depth > 0 and without is None
        if kernels:
            return replace(checks.ALL, drafts=drafts)
        if not suit_kernels(decoder.shape):
            self.fallbacks.note(
                "plain operations are used for all steps",
                f"there are no kernels for all of {decoder.shape.model_type}'s layers: heads of "
                "another size than 16 or a larger power of two, or a window that releases keys",
            )
            return checks.NONE
        with self._streams.forward():
            found = checks.our_kernels_agree(
                decoder, loaded.max_len, num_slots, self.fallbacks, drafts=drafts
            )
        return replace(found, drafts=found.drafts and drafts)

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
        prefill_tokens: int | None = None,
        fingerprints: bool = False,
        max_depth: int = 0,
        mtp: bool = False,
        draft: Path | None = None,
        progress: Callable[[str], None] = lambda _: None,
    ) -> TorchBackend:
        drafts = max_depth > 0 and not deterministic
        with torch.inference_mode():
            loaded = load(
                path,
                dtype=dtype,
                max_len=max_len,
                mtp=mtp and drafts,
                draft=draft if drafts else None,
                kernels=False if safe else None,
                progress=progress,
            )
        decoder = loaded.decoder
        layout = PoolLayout(decoder.shape, decoder.dtype)
        max_depth = affordable_depth(
            max_depth,
            lambda depth: draft_bytes(decoder, None, layout, depth),
            lambda num_tokens: layout.row_bytes(num_tokens, num_tokens),
        )
        return cls(
            loaded,
            num_slots=num_slots,
            deterministic=deterministic,
            pool_bytes=None,
            kernels=False if safe else None,
            prefill_tokens=prefill_tokens,
            fingerprints=fingerprints,
            max_depth=max_depth,
        )

    @property
    def runner(self) -> Runner:
        """One over a memory of some size, where `limit_memory` was not asked for one."""
        if self._runner is None and self._is_limited:
            raise OutOfMemory(
                f"the memory budget leaves no slab of {self._layout.slab_bytes:,} bytes for KV and "
                f"states ({self._memory}): give more with --memory"
            )
        return self._runner or self._make_runner(DEFAULT_POOL_BYTES)

    def launch(self, plan: StepPlan) -> TorchPending:
        runner = self.runner
        step = TorchPending(
            plan=plan,
            sampling=runner.draws,
            streams=self._streams,
            fingerprints=runner.fingerprints,
            dispatched=perf_counter(),
        )
        try:
            with torch.inference_mode(), self._streams.forward():
                runner.execute(step, plan)
        except BaseException:
            step.discard()  # no caller can
            raise
        return step

    @property
    def dtype(self) -> str:
        return str(self._decoder.dtype).removeprefix("torch.")

    @property
    def has_kernels(self) -> bool:
        return self._ways.kernels

    def kernel_errors(self) -> Iterator[tuple[str, float | None, float]]:
        """Of each kernel that is used: how far off plain operations it is, and may be."""
        ways = self._ways
        with torch.inference_mode(), self._streams.forward():
            for name, off in checks.kernel_errors(
                self._decoder,
                ways.num_slots,
                drafts=ways.draft_kernels,
                chunks=ways.chunk_kernels,
            ):
                yield name, off, checks.ROUNDING[self._decoder.dtype]

    # ---- bytes -----------------------------------------------------------------------------

    @property
    def arithmetic(self) -> str:
        return f"torch {ARITHMETIC_VERSION}, torch {torch.__version__}"

    def row_bytes(self, num_tokens: int, num_borrowed: int = 0) -> int:
        """A restored prefix is read where the tree has it; a state is written in one place.

        Of layers with a window a row holds what it sees, and the chunk that it reads.
        """
        newest = max(self.device.prefill_tokens, 1 + 2 * self.max_depth)  # drafts in flight, too
        return self._layout.row_bytes(num_tokens - num_borrowed, newest)

    def transient_bytes(self, plan: StepPlan) -> int:
        return captured_bytes(self.spec, plan)

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        return payload_arrays(self._layout, component, num_tokens)

    def host_memory(self, nbytes: int) -> Bytes:
        return host_memory(self._decoder.device, nbytes)

    def limit_memory(self, budget_bytes: int) -> int:
        """Makes pools of what is left, unless another engine over this model already holds some."""
        if self._runner is not None and (held := self._runner.pools.arena.used_bytes):
            left = budget_bytes - self._memory.total + self._memory.pools
            return min(left, self._runner.pools.capacity_bytes) - held
        self._drop_runner()
        self._is_limited = False
        self._memory = self._share_out(budget_bytes)
        self._is_limited = True
        left = self._memory.pools
        if left >= self._layout.slab_bytes:
            self._make_runner(left)
            if self._meter is not None:
                self._capture_largest()
        else:
            left = min(left, 0)  # a part of a slab holds nothing
        logger.info("memory: %s, of a budget of %s", self._memory, f"{budget_bytes:,}")
        return left

    def _share_out(self, budget_bytes: int) -> MemoryUse:
        tokens, num_slots = self.device.prefill_tokens, self._ways.num_slots
        lengths = largest_chunk(tokens, self.spec.max_len, num_slots)
        capacity = sum(self.row_bytes(length) for length in lengths)
        steps = LargestSteps(
            make_pools=lambda: self._make_runner(capacity).pools,
            run=lambda: self._run_largest(lengths),
            capture=self._capture_largest,
            drop_pools=self._drop_runner,
        )
        return self._shares.of(budget_bytes, steps)

    def _run_largest(self, lengths: list[int]) -> None:
        run_largest_chunk(self.launch, lengths)
        with torch.inference_mode(), self._streams.forward():
            of, size = self._decoder, self._slots.vocab_size
            logits = torch.zeros(size, dtype=of.dtype, device=of.device)
            run_largest_sampling(self._slots, self._ways.num_slots, logits)
            self.runner.run_largest_drafts()

    def _capture_largest(self) -> None:
        with torch.inference_mode(), self._streams.forward():
            self.runner.capture_largest()

    def memory_used(self) -> int:
        held = self._runner
        return self._memory.weights + (held.pools.arena.used_bytes if held is not None else 0)

    def memory_parts(self) -> dict[str, int]:
        return self._memory.parts()

    def buffers_used(self) -> int:
        """They are not counted here."""
        return 0

    def make_way(self, *, busy: bool) -> None:
        """While requests run, nothing is captured (`graphs/steps.py`)."""
        if self._runner is not None and (steps := self._runner.forwards.steps) is not None:
            steps.busy = busy

    def close(self) -> None:
        """Frees all that it holds of the device; it cannot run afterwards."""
        self._slots.clear()
        self._drop_runner()
        self.__dict__.pop("_decoder", None)
        self._draft = None
        self._memory = MemoryUse()
        if self._meter is not None:
            self._meter.give_back()
            self._meter.cap(None)

    def _make_runner(self, capacity_bytes: int) -> Runner:
        assert not self._slots, "pools are made before requests run"
        self._drop_runner()
        with torch.inference_mode(), self._streams.forward():
            self._runner = Runner(
                self._decoder,
                self._draft,
                self._layout,
                self._slots,
                self._future_map,
                self._streams,
                self._ways,
                capacity_bytes,
                self.fallbacks,
            )
        return self._runner

    def _drop_runner(self) -> None:
        if self._runner is not None:
            self._runner.free()
            self._runner = None
            if self._meter is not None:
                self._meter.give_back()
