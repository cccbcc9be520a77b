"""Log probabilities of a prompt's own tokens, chunk by chunk, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from pippin.backends.base import Admit, PrefillRow
from pippin.backends.sampling.rules import scored_positions
from pippin.backends.torch.models.parts import Linear
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sampler import token_logprobs
from pippin.backends.torch.streams import Arrival


class PromptScores:
    def __init__(self, parts: StepParts, head: Linear, *, pads: bool) -> None:
        """`pads`: always as many at a time: a product of another size may be the first of it."""
        self._parts = parts
        self._head = head
        self._pads = pads
        self._arriving: dict[int, list[Arrival]] = {}  # by slot, of chunks before the last

    def retire(self, slot: int) -> None:
        self._arriving.pop(slot, None)

    def add(self, step: TorchPending, chunks: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        """hidden [tokens, hidden]: what the head reads, of every token of the chunks."""
        first = 0
        for chunk in chunks:
            if self.wants(chunk):
                admit = self._parts.slots[chunk.slot]
                self._add_chunk(step, chunk, admit, hidden[first : first + len(chunk.tokens)])
            first += len(chunk.tokens)

    def wants(self, chunk: PrefillRow) -> bool:
        slots = self._parts.slots
        asked = slots[chunk.slot].params.prompt_logprobs is not None
        return asked and not slots.continues_reply(chunk)

    def _add_chunk(
        self, step: TorchPending, chunk: PrefillRow, admit: Admit, hidden: torch.Tensor
    ) -> None:
        """Logits of positions start.. are for tokens start + 1..; the last is drawn."""
        targets = admit.prompt[chunk.start + 1 : chunk.end + 1]
        arriving = self._arriving.setdefault(chunk.slot, [])
        at_a_time = scored_positions(self._parts.slots.vocab_size)
        for start in range(0, len(targets), at_a_time):
            num_scored = min(at_a_time, len(targets) - start)
            end = start + (at_a_time if self._pads else num_scored)
            every = np.arange(start, end).clip(max=len(targets) - 1)  # the last one again
            index, number = self._parts.pools.index, admit.params.prompt_logprobs or 0
            logits = self._head(hidden[index(every)])
            scored = token_logprobs(logits, index(targets[every]), number)
            arriving.append(self._parts.streams.bring([part[:num_scored] for part in scored]))
        if chunk.samples:
            step.prompt_logprobs[chunk.slot] = []
            for arrival in self._arriving.pop(chunk.slot):
                step.read_later(arrival, partial(step.read_prompt_logprobs, chunk.slot))
