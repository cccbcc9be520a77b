"""Where a device's bytes go: counted, measured, and shared out within a budget. Knows no plans.

    budget = weights + pools + activations + graphs + other

Pools are KV and states: what the others leave. Activations are what the largest steps took when
they were tried. Graphs are the memory that captured work keeps. Other is CUDA's own (its context,
kernels), tables of slots and positions, and hidden vectors of the tree.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch

from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import spare_slabs
from pippin.types import Component

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
