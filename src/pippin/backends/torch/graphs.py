"""Decode steps as captured CUDA graphs: a step is one copy of its inputs and one replay.

Tokens come from the future map and go back there inside the graph, so the host has no part in a
step but to say which rows it has. There is a graph for each width out of a few and for each way to
choose tokens; rows that a step has not are padding, which reads zeros and writes waste.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.sampling import SHORT, Draw
from pippin.backends.torch.capture import Recorded, Recorder
from pippin.backends.torch.kernels.decode import DecodeKernels
from pippin.backends.torch.kernels.draw import draw
from pippin.backends.torch.step.decode_inputs import NO_ROWS, Choice, Inputs, pack_inputs
from pippin.backends.torch.step.filters import top_k_threshold


@dataclass(frozen=True)
class Stepped:
    """What a step left: overwritten by the next one of its width."""

    told: torch.Tensor  # int32 [2, width]: tokens, and whether logits are no numbers
    logits: torch.Tensor  # [width, vocab]


@dataclass(frozen=True)
class _Filters:
    """As the graph's inputs have them; columns [rows, 1]."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw: Draw = Draw.SHORT_TOP_K
    has_min_p: bool = True


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
        told = torch.empty(2, logits.shape[0], dtype=torch.int32, device=logits.device)
        if choice is Choice.GREEDY:
            draw(logits, inputs.slot, self._future, told)
        elif choice is Choice.DRAWN:
            draw(
                logits,
                inputs.slot,
                self._future,
                told,
                inverse_temperature=inputs.inverse_temperature,
                thresholds=_thresholds(logits, inputs),
                noisy=inputs.noisy,
                keys=inputs.keys,
            )
        else:
            told[1] = logits[:, 0].isnan()
        return Stepped(told, logits)

    def _capture(self, recorder: Recorder, width: int, choice: Choice) -> _Graph:
        """On rows of padding. The first run compiles kernels, which a capture must not."""
        padding = pack_inputs(width, NO_ROWS, self._waste_cell)
        words = torch.from_numpy(padding).to(self._future.device)
        self._step(Inputs(words), choice)
        return _Graph(words, recorder.record(lambda: self._step(Inputs(words), choice)))


def _thresholds(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that each row keeps."""
    scaled = logits.float() * inputs.inverse_temperature[:, None]
    largest = scaled.topk(min(SHORT, logits.shape[1]), dim=-1).values
    columns = (inputs.top_k, inputs.top_p, inputs.min_p)
    filters = _Filters(*(column[:, None] for column in columns))
    by_min_p = largest[:, :1] + torch.log(filters.min_p)
    is_short = filters.top_k <= SHORT
    return torch.where(is_short, top_k_threshold(largest, filters), by_min_p)[:, 0]
