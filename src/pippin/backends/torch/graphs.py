"""Decode steps as captured CUDA graphs: a step is one copy of its inputs and one replay.

Tokens come from the future map and go back there inside the graph, so the host has no part in a
step but to say which rows it has. There is a graph for each width out of a few and for each way to
choose tokens; rows that a step has not are padding, which reads zeros and writes waste.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.torch.capture import Recorded, Recorder
from pippin.backends.torch.kernels.choose import choose
from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.step.decode_inputs import NO_ROWS, Choice, Inputs, pack_inputs


@dataclass(frozen=True)
class Stepped:
    """What a step left: overwritten by the next one of its width."""

    told: torch.Tensor  # int32 [2, width]: tokens, and whether logits are no numbers
    logits: torch.Tensor  # [width, vocab]


@dataclass(frozen=True)
class _Graph:
    words: torch.Tensor  # what it reads
    step: Recorded[Stepped]


class DecodeSteps:
    """Runs packed inputs: by replaying, or where nothing is captured by launching it all again."""

    def __init__(
        self,
        kernels: DecodeKernels,
        future: torch.Tensor,
        waste_cell: int,
        recorder: Recorder | None,
    ) -> None:
        self._kernels = kernels
        self._future = future
        self._waste_cell = waste_cell
        self._recorder = recorder
        self._graphs: dict[tuple[int, Choice], _Graph] = {}

    def run(self, words: np.ndarray, choice: Choice) -> Stepped:
        """words, int32 [fields, width]: in one copy, without waiting."""
        host = torch.from_numpy(words)
        recorder = self._recorder
        if recorder is None:
            return self._step(Inputs(host.to(self._future.device)), choice)
        width = words.shape[1]
        if (width, choice) not in self._graphs:
            for each in Choice:
                self._graphs[width, each] = self._capture(recorder, width, each)
        graph = self._graphs[width, choice]
        on_cuda = self._future.is_cuda
        graph.words.copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        graph.step.replay()
        return graph.step.result

    def _step(self, inputs: Inputs, choice: Choice) -> Stepped:
        logits = self._kernels.logits(inputs, self._future)
        return Stepped(choose(logits, inputs, self._future, choice), logits)

    def _capture(self, recorder: Recorder, width: int, choice: Choice) -> _Graph:
        """On rows of padding. The first run compiles kernels, which a capture must not."""
        padding = pack_inputs(width, NO_ROWS, self._waste_cell)
        words = torch.from_numpy(padding).to(self._future.device)
        self._step(Inputs(words), choice)
        return _Graph(words, recorder.record(lambda: self._step(Inputs(words), choice)))
