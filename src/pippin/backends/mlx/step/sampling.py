"""Samples what a step has collected to sample, and leaves the tokens in the FutureMap.

Knows no model, and does not launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.base import Admit
from pippin.backends.mlx.step.future_map import FutureMap
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import MLXSampler
from pippin.backends.sampling.sampler import SampleRow


class Sampling:
    def __init__(
        self, sampler: MLXSampler, future_map: FutureMap, admitted: Mapping[int, Admit]
    ) -> None:
        self._sampler = sampler
        self._future_map = future_map
        self._admitted = admitted

    def sample(self, step: MLXPending) -> None:
        """What needs no mask."""
        rows, logits = step.take_to_sample(masked=False)
        if logits is not None:
            self.sample_rows(step, rows, logits, None)

    def sample_rows(
        self,
        step: MLXPending,
        rows: Sequence[SampleRow],
        logits: mx.array,
        masks: np.ndarray | None,
    ) -> None:
        sampled = self._sampler.sample(logits, rows, masks)
        slots = np.array([row.slot for row in rows], dtype=np.int32)
        self._future_map.stash(slots, sampled.tokens)
        step.read_sampled(slots.tolist(), sampled)
        step.written += [*sampled.arrays, *self._future_map.arrays()]

    def num_top_logprobs(self, slot: int) -> int | None:
        admit = self._admitted.get(slot)
        return None if admit is None else admit.params.logprobs
