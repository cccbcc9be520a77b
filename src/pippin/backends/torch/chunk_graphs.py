"""Chunks of prompts as captured CUDA graphs: one copy of their inputs and one replay.

From tokens to the head and the token behind each prompt, which goes into the future map. There is a
graph for each room out of a few and for each way to choose tokens (`step/rooms.py`); what chunks do
not fill is padding, which reads zeros and writes waste. Where a graph cannot be captured this says
so once, and from then on chunks are launched one kernel after the other.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from pippin.backends.torch.capture import Recorded, Recorder
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, ChunkWords
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.rooms import Room

logger = logging.getLogger(__name__)


class PromptForward(Protocol):
    """What is captured: its launches depend on the inputs' room alone."""

    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        """[rows, hidden]: what the head reads at the ends of rows."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def choose(
        self, logits: torch.Tensor, inputs: Inputs, future: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        """int32 [2, rows]: tokens, and whether logits are no numbers."""
        ...


@dataclass(frozen=True)
class RanChunks:
    """What chunks left: overwritten by the next replay."""

    told: torch.Tensor  # int32 [2, rows]: tokens, and whether logits are no numbers
    logits: torch.Tensor  # [rows, vocab]
    hidden: torch.Tensor  # [rows, hidden]


@dataclass(frozen=True)
class _Graph:
    words: torch.Tensor  # what it reads
    run: Recorded[RanChunks]


class ChunkGraphs:
    def __init__(
        self,
        kernels: PromptForward,
        future: torch.Tensor,  # int32 [slots]: the future map
        layout: PoolLayout,
        recorder: Recorder,
    ) -> None:
        self._kernels = kernels
        self._future = future
        self._layout = layout
        self._recorder = recorder
        self._graphs: dict[tuple[Room, Choice], _Graph] = {}
        self.works = True

    def can_run(self, room: Room) -> bool:
        """Captures what is to be captured: before anything of a prompt is in its way."""
        if self.works and (room, Choice.GREEDY) not in self._graphs:
            try:
                self._graphs |= {(room, each): self._capture(room, each) for each in Choice}
            except Exception as error:  # whatever a driver says: the usual launches serve too
                self.works = False
                logger.warning("chunks of prompts are not captured: %s", error, exc_info=error)
        return self.works

    def run(self, words: ChunkWords, choice: Choice) -> RanChunks:
        """In one copy and one replay, without waiting."""
        graph = self._graphs[words.room, choice]
        host, on_cuda = torch.from_numpy(words.words), self._future.is_cuda
        graph.words.copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        graph.run.replay()
        return graph.run.result

    def _capture(self, room: Room, choice: Choice) -> _Graph:
        """On padding alone. The first run compiles kernels, which a capture must not."""
        padding = ChunkWords.padding(room, self._layout)
        words = torch.from_numpy(padding.words).to(self._future.device)
        inputs = ChunkInputs(words, room, padding.num_taps)
        self._run(inputs, choice)
        return _Graph(words, self._recorder.record(lambda: self._run(inputs, choice)))

    def _run(self, inputs: ChunkInputs, choice: Choice) -> RanChunks:
        hidden = self._kernels.hidden(inputs)
        logits = self._kernels.logits(hidden)
        told = self._kernels.choose(logits, inputs.samples, self._future, choice)
        return RanChunks(told, logits, hidden)
