"""Reads a finished step: sampled tokens and log probabilities, from device arrays to plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pippin.backends.mlx.sampler import Logprobs, Sampled
from pippin.types import TokenLogprobs


@dataclass(frozen=True)
class SampledRows:
    slots: np.ndarray  # int32 [rows]; 0 where the row means nothing
    sampled: Sampled

    def tokens(self) -> dict[int, int]:
        """Waits for the step; reads the array's own buffer, which is no new device work."""
        values = np.asarray(self.sampled.tokens)
        pairs = zip(self.slots.tolist(), values.tolist(), strict=True)
        return {slot: token for slot, token in pairs if slot}

    def logprobs(self, wanted: Callable[[int], int | None]) -> dict[int, TokenLogprobs]:
        sampled = self.sampled
        if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return {}
        lines = list(
            token_logprobs(Logprobs(sampled.logprobs, sampled.top_ids, sampled.top_logprobs))
        )
        found: dict[int, TokenLogprobs] = {}
        for slot, line in zip(self.slots.tolist(), lines, strict=True):
            top = wanted(slot) if slot else None
            if top is not None:
                found[slot] = TokenLogprobs(
                    line.logprob, line.top_ids[:top], line.top_logprobs[:top]
                )
        return found


def token_logprobs(logprobs: Logprobs) -> Iterator[TokenLogprobs]:
    chosen, ids, tops = (np.asarray(array).tolist() for array in logprobs)
    for value, line_ids, line_tops in zip(chosen, ids, tops, strict=True):
        yield TokenLogprobs(value, tuple(line_ids), tuple(line_tops))
