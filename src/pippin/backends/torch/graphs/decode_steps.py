"""Decode steps as captured CUDA graphs: a step is one copy of its inputs and one replay.

Tokens come from the future map and go back there inside the graph, so the host has no part in a
step but to say which rows it has. There is a graph for each width out of a few and for each way to
choose tokens; rows that a step has not are padding, which reads zeros and writes waste.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.torch.graphs.capture import Recorder
from pippin.backends.torch.graphs.replays import Replays
from pippin.backends.torch.kernels.choose import choose
from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.step.decode_inputs import (
    FIELDS,
    NO_ROWS,
    Choice,
    Inputs,
    pack_inputs,
)


@dataclass(frozen=True)
class Stepped:
    """What a step left: overwritten by the next one."""

    told: torch.Tensor  # int32 [2, width]: tokens, and whether logits are no numbers
    logits: torch.Tensor | None  # [width, vocab], where they are left to the sampler


class DecodeSteps:
    """Runs packed inputs: by replaying, or where nothing is captured by launching it all again."""

    def __init__(
        self,
        kernels: DecodeKernels,
        future: torch.Tensor,
        waste_cell: int,
        recorder: Recorder | None,
        logits: torch.Tensor,  # [widest, vocab]: where all graphs leave theirs
    ) -> None:
        self._kernels = kernels
        self._future = future
        self._waste_cell = waste_cell
        self._logits = logits
        words = torch.zeros(len(FIELDS) * len(logits), dtype=torch.int32, device=future.device)
        self.replays: Replays[tuple[int, Choice], Stepped] | None = None
        if recorder is not None:
            self.replays = Replays("decode steps", recorder, words, self._padding, self._step)

    def run(self, words: np.ndarray, choice: Choice) -> Stepped:
        """words, int32 [fields, width]: in one copy, without waiting."""
        key = (words.shape[1], choice)
        if self.replays is None:
            return self._step(key, torch.from_numpy(words).to(self._future.device))
        self.replays.prepare((words.shape[1], each) for each in Choice)
        return self.replays.run(key, words)

    def _step(self, key: tuple[int, Choice], words: torch.Tensor) -> Stepped:
        width, choice = key
        inputs = Inputs(words.view(len(FIELDS), width))
        logits = self._kernels.logits(inputs, self._future)
        told = choose(logits, inputs, self._future, choice)
        is_left = choice is Choice.LOGITS
        return Stepped(told, self._logits[:width].copy_(logits) if is_left else None)

    def _padding(self, key: tuple[int, Choice]) -> np.ndarray:
        return pack_inputs(key[0], NO_ROWS, self._waste_cell)
