"""Log probabilities of a prompt's own tokens, chunk by chunk, for requests that ask for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.step.prompt_scores import PromptScores
from pippin.backends.torch.models.parts import Linear
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending
from pippin.backends.torch.step.sampler import token_logprobs


class TorchPromptScores(PromptScores[torch.Tensor, TorchPending]):
    def __init__(self, parts: StepParts, head: Linear, *, pads: bool) -> None:
        """`pads`: always as many at a time: a product of another size may be the first of it."""
        super().__init__(parts.slots, parts.slots.vocab_size)
        self._index = parts.pools.index
        self._head = head
        self._pads = pads

    def _score(
        self,
        step: TorchPending,
        source: torch.Tensor,  # [tokens, hidden]: what the head reads
        targets: np.ndarray,
        places: range,
        number: int,
    ) -> Sequence[torch.Tensor]:
        num_scored = min(len(places), len(targets) - places.start)
        every = np.array(places) if self._pads else np.array(places[:num_scored])
        every = every.clip(max=len(targets) - 1)  # the last one again
        logits = self._head(source[self._index(every)])
        scored = token_logprobs(logits, self._index(targets[every]), number)
        return [part[:num_scored] for part in scored]
