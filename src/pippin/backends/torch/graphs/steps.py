"""Steps as captured CUDA graphs: one copy of a step's words and one replay. Knows no kernels.

Tokens come from the future map and the next ones go back there inside the graph, so all that the
host adds is which rows a step has. There is a graph for each size out of a few (the width of a
decode step, the room of prompts' chunks) and for each way to choose tokens; rows that a step does
not fill are padding, which reads zeros and writes waste.

While no request runs, work is captured before it is first needed: at load, all that there can be.
A capture holds the host up for 10 to 20 ms, so while requests run nothing is captured, and what is
not captured is launched. If a capture fails, what is not captured is launched from then on; if the
work itself raises before it is captured, that size is left to plain operations. Both are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from pippin.backends.fallbacks import Fallbacks
from pippin.backends.torch.graphs.capture import CaptureFailed, CudaGraphs, Recorded
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step.chunk_inputs import ChunkInputs, ChunkWords
from pippin.backends.torch.step.decode_inputs import FIELDS, NO_ROWS, Choice, Inputs, pack_inputs
from pippin.backends.torch.step.sizes import MIXED_ROOMS, MIXED_WIDTHS, ROOMS, MixedSize, Room
from pippin.backends.torch.step.verify.words import MOST_TOKENS, VerifySize, padding_words
from pippin.errors import DeviceFailed

Size = TypeVar("Size", bound=Hashable)

# Of logits, how their rows sample, the future map and a choice: int32 [2, rows], see `Ran.drawn`.
Choose = Callable[[torch.Tensor, Inputs, torch.Tensor, Choice], torch.Tensor]


class Forwarded(NamedTuple):
    logits: torch.Tensor  # [rows, vocab]
    inputs: Inputs  # how the rows sample
    hidden: torch.Tensor | None = None  # [rows, hidden]: what the head read, of prompts
    every_hidden: torch.Tensor | None = None  # [tokens, hidden], of prompts


@dataclass(frozen=True)
class Ran:
    """What a step left: overwritten by the next one."""

    drawn: torch.Tensor  # int32 [2, rows]: tokens, and whether logits are NaN
    logits: torch.Tensor | None = None  # [rows, vocab], where they are left to the sampler
    hidden: torch.Tensor | None = None
    every_hidden: torch.Tensor | None = None


class CapturedSteps(Generic[Size]):
    """All graphs read one array of words: they run one after the other."""

    def __init__(
        self,
        name: str,
        recorder: CudaGraphs | None,  # None: every step is launched
        largest: Size,
        padding: Callable[[Size], np.ndarray],  # int32 words of no rows
        forward: Callable[[Size, torch.Tensor], Forwarded],  # its launches depend on the size alone
        choose: Choose,
        future: torch.Tensor,  # int32 [slots]: the future map
        logits: torch.Tensor,  # [most rows, vocab]: where all graphs leave theirs
        choices: Sequence[Choice] = tuple(Choice),
        fallbacks: Fallbacks | None = None,
        tokens_of: Callable[[Size], int] = lambda size: 1,  # of a row: the first's logits are left
    ) -> None:
        self._name = name
        self._tokens_of = tokens_of
        self._fallbacks = fallbacks or Fallbacks()
        self._recorder = recorder
        self._padding = padding
        self._forward = forward
        self._choose = choose
        self._future = future
        self._logits = logits
        self._choices = choices
        self._words = torch.zeros(padding(largest).size, dtype=torch.int32, device=future.device)
        self.graphs: dict[tuple[Size, Choice], Recorded[Ran]] = {}
        self.works = recorder is not None
        self.failed: set[Size] = set()  # whose work cannot be run: a caller has plain operations
        self.busy = False  # requests run

    def prepare(self, size: Size) -> bool:
        """Captures a size if there is time. Whether captures work."""
        return self.can_run(size) and self.works

    def can_run(self, size: Size) -> bool:
        """The same; whether `run` may be called, captured or not."""
        if not self.busy:
            self._capture(size, self._choices)
        return size not in self.failed

    def has(self, size: Size, choice: Choice) -> bool:
        """Whether that is captured, if need be now."""
        self.prepare(size)
        return (size, choice) in self.graphs

    def run(self, size: Size, words: np.ndarray, choice: Choice) -> Ran:
        """words, int32: in one copy, without waiting. What it returns lasts until the next run."""
        if not self.busy:
            self._capture(size, (choice,))
        sent = self._send(words)
        if (graph := self.graphs.get((size, choice))) is None:
            return self._run(size, choice, sent)
        graph.replay()
        return graph.result

    def _capture(self, size: Size, choices: Sequence[Choice]) -> None:
        missing = [choice for choice in choices if (size, choice) not in self.graphs]
        if not missing or self._recorder is None or not self.works or size in self.failed:
            return
        try:
            words = self._send(self._padding(size))
            forwarded = self._forward(size, words)  # it may compile kernels, captures must not
            for choice in missing:
                self._chosen(size, forwarded, choice)
            del forwarded
            for choice in missing:
                run = partial(self._run, size, choice, words)
                self.graphs[size, choice] = self._recorder.record(run)
        except DeviceFailed:
            raise
        except (CaptureFailed, torch.OutOfMemoryError) as error:  # it can be launched
            self.works = False
            self._fallbacks.note(f"{self._name} are launched, not captured", error, error)
        except Exception as error:  # of any kind from a compiler or driver: launched it would raise
            self.failed.add(size)
            what = f"plain operations are used for {self._name} of some sizes"
            self._fallbacks.note(what, error, error)

    def _run(self, size: Size, choice: Choice, words: torch.Tensor) -> Ran:
        return self._chosen(size, self._forward(size, words), choice)

    def _chosen(self, size: Size, forwarded: Forwarded, choice: Choice) -> Ran:
        logits, inputs, *hidden = forwarded
        drawn = self._choose(logits, inputs, self._future, choice)
        left = None
        if choice is Choice.LOGITS:
            firsts = logits[:: self._tokens_of(size)]
            left = self._logits[: len(firsts)].copy_(firsts)
        return Ran(drawn, left, *hidden)

    def _send(self, words: np.ndarray) -> torch.Tensor:
        host, on_cuda = torch.from_numpy(words).view(-1), self._words.is_cuda
        there = self._words[: len(host)]
        there.copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        return there


class DecodeForward(Protocol):
    def logits(self, inputs: Inputs, future: torch.Tensor) -> torch.Tensor:
        """[rows, vocab] of the tokens that `future`, int32 [slots], has of the rows."""
        ...


class PromptForward(Protocol):
    def hidden(self, inputs: ChunkInputs) -> torch.Tensor:
        """[tokens, hidden]: what the head reads, if it does."""
        ...


class MixedForward(Protocol):
    def hidden(self, rows: Inputs, chunks: ChunkInputs, future: torch.Tensor) -> torch.Tensor:
        """[rows + tokens, hidden]: what the head reads, of rows and behind them of chunks."""
        ...


class VerifyForward(Protocol):
    def logits(self, size: VerifySize, words: torch.Tensor) -> tuple[torch.Tensor, Inputs]:
        """[tokens, vocab], and how the tokens sample; words, int32 [fields, rows]."""
        ...

    def choose(
        self, logits: torch.Tensor, inputs: Inputs, future: torch.Tensor, choice: Choice
    ) -> torch.Tensor:
        """int32 [3 + width, rows]"""
        ...


def decode_steps(
    kernels: DecodeForward,
    choose: Choose,
    future: torch.Tensor,
    waste_cell: int,
    recorder: CudaGraphs | None,
    logits: torch.Tensor,
    fallbacks: Fallbacks | None = None,
) -> CapturedSteps[int]:
    def forward(width: int, words: torch.Tensor) -> Forwarded:
        inputs = Inputs(words.view(len(FIELDS), width))
        return Forwarded(kernels.logits(inputs, future), inputs)

    def padding(width: int) -> np.ndarray:
        return pack_inputs(width, NO_ROWS, waste_cell)

    largest = len(logits)
    return CapturedSteps(
        "decode steps",
        recorder,
        largest,
        padding,
        forward,
        choose,
        future,
        logits,
        fallbacks=fallbacks,
    )


def chunk_steps(
    kernels: PromptForward,
    head: Callable[[torch.Tensor], torch.Tensor],
    choose: Choose,
    future: torch.Tensor,
    layout: PoolLayout,
    recorder: CudaGraphs,
    logits: torch.Tensor,
    fallbacks: Fallbacks | None = None,
) -> CapturedSteps[Room]:
    sizes = ROOMS[-1].num_tokens, layout.shape.hidden
    kept = torch.empty(sizes, dtype=layout.dtype, device=logits.device)  # by all graphs

    def forward(room: Room, words: torch.Tensor) -> Forwarded:
        inputs = ChunkInputs.of(words, room, layout)
        every = kept[: room.num_tokens].copy_(kernels.hidden(inputs))
        hidden = every[inputs.last.long()]
        return Forwarded(head(hidden), inputs.samples, hidden, every)

    def padding(room: Room) -> np.ndarray:
        return ChunkWords.padding(room, layout).words

    return CapturedSteps(
        "chunks of prompts",
        recorder,
        ROOMS[-1],
        padding,
        forward,
        choose,
        future,
        logits,
        fallbacks=fallbacks,
    )


def mixed_steps(
    kernels: MixedForward,
    head: Callable[[torch.Tensor], torch.Tensor],
    choose: Choose,
    future: torch.Tensor,
    layout: PoolLayout,
    recorder: CudaGraphs,
    logits: torch.Tensor,
    fallbacks: Fallbacks | None = None,
) -> CapturedSteps[MixedSize]:
    """Words and results have the decode rows first. What needs the sampler is not run here."""
    largest = MixedSize(MIXED_WIDTHS[-1], MIXED_ROOMS[-1])
    sizes = largest.room.num_tokens, layout.shape.hidden
    kept = torch.empty(sizes, dtype=layout.dtype, device=logits.device)  # by all graphs

    def forward(size: MixedSize, words: torch.Tensor) -> Forwarded:
        num_words = len(FIELDS) * size.width
        rows = Inputs(words[:num_words].view(len(FIELDS), size.width))
        chunks = ChunkInputs.of(words[num_words:], size.room, layout)
        found = kernels.hidden(rows, chunks, future)
        every = kept[: size.room.num_tokens].copy_(found[size.width :])
        hidden = torch.cat([found[: size.width], every[chunks.last.long()]])
        inputs = Inputs(torch.cat([rows.words, chunks.samples.words], dim=1))
        return Forwarded(head(hidden), inputs, hidden[size.width :], every)

    def padding(size: MixedSize) -> np.ndarray:
        rows = pack_inputs(size.width, NO_ROWS, layout.waste_cell)
        return np.concatenate([rows.ravel(), ChunkWords.padding(size.room, layout).words])

    return CapturedSteps(
        "decode rows beside chunks",
        recorder,
        largest,
        padding,
        forward,
        choose,
        future,
        logits,
        choices=(Choice.DRAWN, Choice.TOP_P),
        fallbacks=fallbacks,
    )


def verify_steps(
    kernels: VerifyForward,
    future: torch.Tensor,
    span: int,
    layout: PoolLayout,
    recorder: CudaGraphs | None,
    logits: torch.Tensor,
    fallbacks: Fallbacks | None = None,
) -> CapturedSteps[VerifySize]:
    """`Choice.LOGITS`: some rows are left to the sampler, and the others draw their tokens."""

    def forward(size: VerifySize, words: torch.Tensor) -> Forwarded:
        return Forwarded(*kernels.logits(size, words.view(size.num_fields, size.num_rows)))

    def padding(size: VerifySize) -> np.ndarray:
        return padding_words(size, layout.waste_cell)

    return CapturedSteps(
        "steps with drafts",
        recorder,
        VerifySize(MOST_TOKENS, 0, span),
        padding,
        forward,
        kernels.choose,
        future,
        logits,
        fallbacks=fallbacks,
        tokens_of=lambda size: size.width,
    )
