"""Steps as captured CUDA graphs: one copy of a step's words and one replay. Knows no kernels.

Tokens come from the future map and the next ones go back there inside the graph, so all that the
host adds is which rows a step has. There is a graph for each size out of a few (the width of a
decode step, the room of prompts' chunks) and for each way to choose tokens; rows that a step does
not fill are padding, which reads zeros and writes waste.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from pippin.backends.torch.graphs.capture import Recorder
from pippin.backends.torch.graphs.replays import Replays
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, ChunkWords
from pippin.backends.torch.step.decode_inputs import FIELDS, NO_ROWS, Choice, Inputs, pack_inputs
from pippin.backends.torch.step.sizes import ROOMS, Room

Size = TypeVar("Size", bound=Hashable)

# Of logits, how their rows sample, the future map and a choice: int32 [2, rows], see `Ran.drawn`.
Choose = Callable[[torch.Tensor, Inputs, torch.Tensor, Choice], torch.Tensor]


class Forwarded(NamedTuple):
    logits: torch.Tensor  # [rows, vocab]
    inputs: Inputs  # how the rows sample
    hidden: torch.Tensor | None = None  # [rows, hidden]: what the head read, of prompts


@dataclass(frozen=True)
class Ran:
    """What a step left: overwritten by the next one."""

    drawn: torch.Tensor  # int32 [2, rows]: tokens, and whether logits are NaN
    logits: torch.Tensor | None  # [rows, vocab], where they are left to the sampler
    hidden: torch.Tensor | None


class CapturedSteps(Generic[Size]):
    def __init__(
        self,
        name: str,
        recorder: Recorder | None,  # None: every step is launched
        largest: Size,
        padding: Callable[[Size], np.ndarray],  # int32 words of no rows
        forward: Callable[[Size, torch.Tensor], Forwarded],  # its launches depend on the size alone
        choose: Choose,
        future: torch.Tensor,  # int32 [slots]: the future map
        logits: torch.Tensor,  # [most rows, vocab]: where all graphs leave theirs
    ) -> None:
        self._forward = forward
        self._choose = choose
        self._future = future
        self._logits = logits
        words = torch.zeros(padding(largest).size, dtype=torch.int32, device=future.device)
        self.replays: Replays[tuple[Size, Choice], Ran] = Replays(
            name, recorder, words, lambda key: padding(key[0]), self._run
        )

    def prepare(self, size: Size) -> bool:
        """Captures what there is time for. Whether captures work."""
        return self.replays.prepare((size, each) for each in Choice)

    def run(self, size: Size, words: np.ndarray, choice: Choice) -> Ran:
        """words, int32: in one copy, without waiting."""
        return self.replays.run((size, choice), words)

    def _run(self, key: tuple[Size, Choice], words: torch.Tensor) -> Ran:
        size, choice = key
        logits, inputs, hidden = self._forward(size, words)
        drawn = self._choose(logits, inputs, self._future, choice)
        is_left = choice is Choice.LOGITS
        return Ran(drawn, self._logits[: len(logits)].copy_(logits) if is_left else None, hidden)


class DecodeForward(Protocol):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] of the tokens that `future`, int32 [slots], has of the rows."""
        ...


class PromptForward(Protocol):
    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        """[rows, hidden]: what the head reads at the ends of rows."""
        ...


def decode_steps(
    kernels: DecodeForward,
    choose: Choose,
    future: torch.Tensor,
    waste_cell: int,
    recorder: Recorder | None,
    logits: torch.Tensor,
) -> CapturedSteps[int]:
    def forward(width: int, words: torch.Tensor) -> Forwarded:
        inputs = Inputs(words.view(len(FIELDS), width))
        return Forwarded(kernels.logits(inputs, future), inputs)

    def padding(width: int) -> np.ndarray:
        return pack_inputs(width, NO_ROWS, waste_cell)

    largest = len(logits)
    return CapturedSteps(
        "decode steps", recorder, largest, padding, forward, choose, future, logits
    )


def chunk_steps(
    kernels: PromptForward,
    head: Callable[[torch.Tensor], torch.Tensor],
    choose: Choose,
    future: torch.Tensor,
    layout: PoolLayout,
    recorder: Recorder,
    logits: torch.Tensor,
) -> CapturedSteps[Room]:
    def forward(room: Room, words: torch.Tensor) -> Forwarded:
        inputs = ChunkInputs.of(words, room, layout)
        hidden = kernels.hidden(inputs)
        return Forwarded(head(hidden), inputs.samples, hidden)

    def padding(room: Room) -> np.ndarray:
        return ChunkWords.padding(room, layout).words

    return CapturedSteps(
        "chunks of prompts", recorder, ROOMS[-1], padding, forward, choose, future, logits
    )
