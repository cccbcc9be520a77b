"""Chunks of prompts as captured CUDA graphs: one copy of their inputs and one replay.

From tokens to the head and the token behind each prompt, which goes into the future map. There is a
graph for each room out of a few and for each way to choose tokens (`step/rooms.py`); what chunks do
not fill is padding, which reads zeros and writes waste. Where a graph cannot be captured this says
so once, and from then on chunks are launched one kernel after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pippin.backends.torch.graphs.capture import Recorder
from pippin.backends.torch.graphs.replays import Replays
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, ChunkWords, num_taps_of
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.rooms import ROOMS, Room


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
    logits: torch.Tensor | None  # [rows, vocab], where they are left to the sampler
    hidden: torch.Tensor  # [rows, hidden]


class ChunkGraphs:
    def __init__(
        self,
        kernels: PromptForward,
        future: torch.Tensor,  # int32 [slots]: the future map
        layout: PoolLayout,
        recorder: Recorder,
        logits: torch.Tensor,  # [rows of a room, vocab]: where all graphs leave theirs
    ) -> None:
        self._kernels = kernels
        self._future = future
        self._layout = layout
        self._logits = logits
        most = max(ChunkWords.padding(room, layout).words.size for room in ROOMS)
        words = torch.zeros(most, dtype=torch.int32, device=future.device)
        self.replays: Replays[tuple[Room, Choice], RanChunks] = Replays(
            "chunks of prompts", recorder, words, self._padding, self._run
        )

    @property
    def works(self) -> bool:
        return self.replays.works

    def can_run(self, room: Room) -> bool:
        """Captures what there is time for: before anything of a prompt is in its way."""
        return self.replays.prepare((room, each) for each in Choice)

    def run(self, words: ChunkWords, choice: Choice) -> RanChunks:
        """In one copy and one replay, without waiting."""
        return self.replays.run((words.room, choice), words.words)

    def _padding(self, key: tuple[Room, Choice]) -> np.ndarray:
        return ChunkWords.padding(key[0], self._layout).words

    def _run(self, key: tuple[Room, Choice], words: torch.Tensor) -> RanChunks:
        room, choice = key
        inputs = ChunkInputs(words, room, num_taps_of(self._layout))
        hidden = self._kernels.hidden(inputs)
        logits = self._kernels.logits(hidden)
        told = self._kernels.choose(logits, inputs.samples, self._future, choice)
        is_left = choice is Choice.LOGITS
        kept = self._logits[: room.num_rows].copy_(logits) if is_left else None
        return RanChunks(told, kept, hidden)
