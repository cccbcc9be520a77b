"""A device's bytes: measured by the largest steps there can be, and shared out within a budget.

    budget = weights + pools + activations + graphs + other

Pools are KV and states: what the others leave. Activations are what the largest steps took when
they were tried: a chunk of as many tokens as a step takes, scored and sampled; and the sampler with
every stage for all slots. Graphs are the memory that captured work keeps. Other is CUDA's own (its
context, kernels), tables of slots and positions, and hidden vectors of the tree.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count

import numpy as np
import torch

from pippin.amounts import option_bytes, show_bytes
from pippin.backends.base import Admit, PrefillRow, Retire, StepPlan
from pippin.backends.masks import WORD_BITS
from pippin.backends.sampling.rules import SHORT
from pippin.backends.sampling.sampler import MAX_TOP_LOGPROBS, SampleRow
from pippin.backends.torch.drafts.drafters import HEAD_LENGTH, model_ring_bytes
from pippin.backends.torch.drafts.ring import ring_bytes
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools, spare_slabs
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.slots import Slots
from pippin.errors import LoadError
from pippin.types import Component, SamplingParams

MOST_CONTEXT_BYTES = 1 << 30  # of CUDA's own; what is beyond is other processes'
DRIVER_BYTES_PER_GRAPH = 1 << 20
HIDDEN_SHARE = 0.01  # of the pools: vectors that the tree keeps beside them
SLACK = 1.02  # before torch's allocator refuses
INDEX_BYTES = 16  # of a token that a launched chunk sees: where its cell is, twice


class CudaMeter:
    """What this process holds of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserved(self) -> int:
        """By torch, for tensors and for later."""
        return int(torch.cuda.memory_reserved(self._device))

    def outside(self) -> int:
        """By CUDA itself, for this process."""
        free, total = torch.cuda.mem_get_info(self._device)
        return min(max(int(total) - int(free) - self.reserved(), 0), MOST_CONTEXT_BYTES)

    def free(self) -> int:
        """That no process holds."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak(self, run: Callable[[], None]) -> int:
        """What `run` reserved at most beside what was reserved before."""
        before = self.reserved()
        torch.cuda.reset_peak_memory_stats(self._device)
        run()
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device)) - before

    def cap(self, nbytes: int | None) -> None:
        """Torch reserves no more than that. None: what the device has."""
        total = torch.cuda.mem_get_info(self._device)[1]
        share = 1.0 if nbytes is None else min(max(nbytes, 0) / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self._device)

    def give_back(self) -> None:
        """To the device what torch keeps for later. Waits for the device."""
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


@dataclass(frozen=True)
class MemoryUse:
    weights: int = 0
    pools: int = 0  # what requests and the tree may take of them; negative: it does not fit
    activations: int = 0
    graphs: int = 0
    other: int = 0

    def parts(self) -> dict[str, int]:
        return asdict(self)

    @property
    def total(self) -> int:
        return sum(self.parts().values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.parts().items())
        return f"{parts}; {self.total:,} bytes in all"


def share_out(available: int, needs: MemoryUse, layout: PoolLayout, max_len: int) -> MemoryUse:
    """`needs`: all but the pools, whatever these hold."""
    left = available - needs.total - spare_slabs(layout) * layout.slab_bytes
    hidden = int(max(left, 0) * HIDDEN_SHARE)
    left -= hidden
    seen = _seen_bytes(max(left, 0), layout, max_len)
    left -= seen
    return replace(
        needs,
        pools=left // layout.slab_bytes * layout.slab_bytes,
        activations=needs.activations + seen,
        other=needs.other + hidden,
    )


def _seen_bytes(left: int, layout: PoolLayout, max_len: int) -> int:
    """Of one layer's KV, which a launched chunk gathers: of the longest row there can be."""
    each = layout.kv_layer_bytes + INDEX_BYTES
    cell = layout.cell_bytes(Component.ATTENTION)
    return min(max_len * each, left * each // (cell + each)) if cell else 0


ACTIVATION_SHARE = 0.1  # of what the weights leave, where nothing is measured


@dataclass(frozen=True)
class LargestSteps:
    """How the largest steps are run, over pools that hold them and nothing else."""

    make_pools: Callable[[], Pools]
    run: Callable[[], None]
    capture: Callable[[], None]
    drop_pools: Callable[[], None]


def draft_bytes(decoder: Decoder, draft: Decoder | None, layout: PoolLayout, max_depth: int) -> int:
    """That a slot takes, whether it has drafts or not."""
    ring = 0
    if draft is not None and max_depth:
        ring = model_ring_bytes(draft)
    elif decoder.mtp is not None and max_depth:
        ring = ring_bytes([decoder.mtp.mixer], HEAD_LENGTH, decoder.dtype.itemsize)
    return ring + layout.kept_bytes(max_depth)


@dataclass
class MemoryShares:
    layout: PoolLayout
    weights: int  # bytes
    drafts: int  # bytes that every slot's drafts take
    num_slots: int
    max_len: int
    prefill_tokens: int
    num_graphs: int
    meter: CudaMeter | None  # None: nothing can be measured
    _needs: MemoryUse | None = None  # measured once

    def of(self, budget_bytes: int, steps: LargestSteps) -> MemoryUse:
        meter = self.meter
        if meter is None:
            left = budget_bytes - self.weights - self.drafts
            activations = int(left * ACTIVATION_SHARE)
            return MemoryUse(self.weights, left - activations, activations, other=self.drafts)
        available = min(budget_bytes, meter.free() + meter.reserved() + meter.outside())
        if self._needs is None and available > self.weights + meter.outside():
            meter.cap(available - meter.outside())
            try:
                self._needs = self._measure(meter, steps)
            except torch.OutOfMemoryError as error:
                steps.drop_pools()
                raise LoadError(
                    f"memory: a step of {self.prefill_tokens:,} tokens and {self.num_slots:,} rows "
                    f"does not fit {show_bytes(available)} beside {show_bytes(self.weights)} of "
                    f"weights: give more with --memory (now {option_bytes(budget_bytes)}), or "
                    f"lower --prefill-tokens or --max-running ({error})"
                ) from error
        needs = self._needs or MemoryUse(self.weights)
        needs = replace(needs, other=needs.other + meter.outside())
        meter.cap(int(available * SLACK) - meter.outside())
        return share_out(available, needs, self.layout, self.max_len)

    def _measure(self, meter: CudaMeter, steps: LargestSteps) -> MemoryUse:
        meter.give_back()
        before = meter.reserved()
        tables = -before - steps.make_pools().memory.nbytes + meter.reserved()
        activations = meter.peak(steps.run)
        meter.give_back()
        kept = meter.reserved()
        at_capture = meter.peak(steps.capture)
        meter.give_back()
        graphs = meter.reserved() - kept
        steps.drop_pools()
        return MemoryUse(
            self.weights,
            activations=max(activations, at_capture - graphs),
            graphs=graphs + self.num_graphs * DRIVER_BYTES_PER_GRAPH,
            other=max(before - self.weights, 0) + tables,
        )


FIRST_STEP = -(1 << 41)  # before those of any request, and of any that warms up
HUNGRY = SamplingParams(
    temperature=1.0,
    top_k=SHORT + 1,  # sorts the vocabulary
    top_p=0.9,
    min_p=0.01,
    frequency_penalty=0.5,
    presence_penalty=0.5,
    repetition_penalty=1.1,
    logprobs=MAX_TOP_LOGPROBS,
)
SCORED = SamplingParams(temperature=1.0, prompt_logprobs=MAX_TOP_LOGPROBS)


def largest_chunk(prefill_tokens: int, max_len: int, num_slots: int) -> list[int]:
    """Tokens of each row of the largest chunk: as few rows as it takes."""
    longest = max(max_len - 1, 1)
    full, rest = divmod(prefill_tokens, longest)
    return ([longest] * full + [rest] * (rest > 0))[:num_slots]


def run_largest_chunk(launch: Callable[[StepPlan], TorchPending], lengths: list[int]) -> None:
    prompts = {slot: np.zeros(n, dtype=np.int32) for slot, n in enumerate(lengths, start=1)}
    steps: Iterator[int] = count(FIRST_STEP)
    admit = tuple(Admit(slot, SCORED, (), prompt, seed=1) for slot, prompt in prompts.items())
    rows = tuple(PrefillRow(slot, 0, prompt, samples=True) for slot, prompt in prompts.items())
    launch(StepPlan(next(steps), admit=admit, prefill=rows)).wait()
    launch(StepPlan(next(steps), retire=tuple(Retire(slot) for slot in prompts))).wait()


def run_largest_sampling(slots: Slots, num_slots: int, logits: torch.Tensor) -> None:
    """Of rows that wait for their masks; logits [vocab]: of any of them."""
    owners = range(1, num_slots + 1)
    prompt = np.zeros(1, dtype=np.int32)
    masks = np.full((num_slots, -(-len(logits) // WORD_BITS)), -1, dtype=np.int32)
    for params in (HUNGRY, replace(HUNGRY, top_k=0)):  # without a sort, too: kernels are compiled
        for slot in owners:
            slots.admit(Admit(slot, params, (), prompt, seed=slot))
        waiting = [logits.clone() for _ in owners]
        rows = [SampleRow(slot, 0) for slot in owners]
        slots.sampler.sample(torch.stack(waiting), rows, masks)
        for slot in owners:
            slots.retire(slot)
