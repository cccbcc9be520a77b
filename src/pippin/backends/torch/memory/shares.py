"""A budget divided by what was measured: weights, the largest steps, graphs; pools get the rest.

Knows no plans: a backend says how its largest steps are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from pippin.amounts import option_bytes, show_bytes
from pippin.backends.torch.drafts.drafters import HEAD_LENGTH, model_ring_bytes
from pippin.backends.torch.drafts.ring import ring_bytes
from pippin.backends.torch.memory.budget import (
    DRIVER_BYTES_PER_GRAPH,
    SLACK,
    CudaMeter,
    MemoryUse,
    share_out,
)
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.errors import LoadError

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
