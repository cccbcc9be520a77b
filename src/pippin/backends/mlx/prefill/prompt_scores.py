"""Log probabilities of a prompt's own tokens, in blocks of positions. Knows no model.

The float32 logits of a whole chunk are 2 GB for 2,048 positions of a vocabulary of 250,000. The
head is computed for as many positions at a time as a byte limit allows, and each block waits for
the one before, so that few are alive at once: part of the activations that the budget sets aside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from pippin.backends.base import Admit, PrefillRow
from pippin.backends.mlx.step.pending import MLXPending
from pippin.backends.mlx.step.sampler import token_logprobs
from pippin.backends.sampling.rules import SCORED_BYTES, scored_positions
from pippin.backends.sampling.sampler import Logprobs

# Logits [1, n, vocab] of what the head reads of n positions.
ToLogits = Callable[[mx.array], mx.array]

# Blocks' worth of logits that are alive at a time, as measured: copies of one (as the head computes
# them, in float32, reordered to search them), and blocks that mlx allocates ahead.
ALIVE = 12
LEAST_BYTES = 1 << 20


class PromptScores:
    def __init__(self, vocab_size: int, admitted: Mapping[int, Admit]) -> None:
        self._vocab_size = vocab_size
        self._admitted = admitted
        self._found: dict[int, list[Logprobs[mx.array]]] = {}  # by slot, of chunks before the last
        self.block_bytes = SCORED_BYTES  # of float32 logits

    def fit(self, activation_bytes: float) -> None:
        """Let blocks, with their copies, take half of what activations may take."""
        fitting = int(activation_bytes) // (2 * ALIVE)
        self.block_bytes = min(max(fitting, LEAST_BYTES), SCORED_BYTES)

    def wants(self, chunk: PrefillRow) -> bool:
        admit = self._admitted[chunk.slot]
        return admit.params.prompt_logprobs is not None and chunk.start < len(admit.prompt)

    def drop(self, slot: int) -> None:
        self._found.pop(slot, None)

    def clear(self) -> None:
        self._found.clear()

    def add(
        self,
        step: MLXPending,
        chunk: PrefillRow,
        source: mx.array,  # [1, positions, ...]: of every position of the chunk
        to_logits: ToLogits,
    ) -> None:
        """Logits of positions start.. are for tokens start + 1..; the last is drawn."""
        admit = self._admitted[chunk.slot]
        targets = mx.array(admit.prompt[chunk.start + 1 : chunk.end + 1])
        found = self._found.setdefault(chunk.slot, [])
        at_a_time = scored_positions(self._vocab_size, self.block_bytes)
        for start in range(0, len(targets), at_a_time):
            stop = min(start + at_a_time, len(targets))
            block = source[:, start:stop]
            if step.last_scored is not None:  # else mlx computes the logits of all blocks first
                (block,) = mx.depends([block], list(step.last_scored))
            top = admit.params.prompt_logprobs or 0
            scored = token_logprobs(to_logits(block)[0], targets[start:stop], top)
            found.append(scored)
            step.last_scored = scored
            step.written += list(scored)
        if chunk.samples:
            step.read_prompt_scores(chunk.slot, self._found.pop(chunk.slot))
