"""Log probabilities of a prompt's own tokens, in blocks of positions.

Each block waits for the one before, so that few are alive at once: part of the activations that the
budget sets aside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import token_logprobs
from pippin.backends.sampling.rules import SCORED_BYTES
from pippin.backends.step.prompt_scores import PromptScores
from pippin.backends.step.slots import SlotTable

# Logits [1, n, vocab] of what the head reads of n positions.
ToLogits = Callable[[mx.array], mx.array]

# Blocks' worth of logits that are alive at a time, as measured: copies of one (as the head computes
# them, in float32, reordered to search them), and blocks that mlx allocates ahead.
ALIVE = 12
LEAST_BYTES = 1 << 20


class MLXPromptScores(PromptScores[mx.array, MLXPending]):
    def __init__(self, slots: SlotTable[mx.array], vocab_size: int, to_logits: ToLogits) -> None:
        super().__init__(slots, vocab_size)
        self._to_logits = to_logits

    def fit(self, activation_bytes: float) -> None:
        """Let blocks, with their copies, take half of what activations may take."""
        fitting = int(activation_bytes) // (2 * ALIVE)
        self.block_bytes = min(max(fitting, LEAST_BYTES), SCORED_BYTES)

    def _score(
        self, step: MLXPending, source: mx.array, targets: np.ndarray, places: range, number: int
    ) -> Sequence[mx.array]:
        """`source` [1, positions, hidden], or logits of a head that computes all of them."""
        block = source[:, places.start : min(places.stop, len(targets))]
        if step.last_scored:  # else mlx computes the logits of all blocks first
            (block,) = mx.depends([block], list(step.last_scored))
        ids = mx.array(targets[places.start : places.stop])
        step.last_scored = token_logprobs(self._to_logits(block)[0], ids, number)
        return step.last_scored
