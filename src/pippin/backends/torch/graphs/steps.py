"""Steps as captured CUDA graphs: one copy of a step's words and one replay.

Tokens come from the future map and the next ones go back there inside the graph, so all that the
host adds is which rows a step has. There is a graph for each size out of a few (`step/words.py`)
and for each way to choose tokens.

While no request runs, work is captured before it is first needed: at load, all that there can be.
A capture holds the host up for 10 to 20 ms, so while requests run nothing is captured, and what is
not captured is launched. If a capture fails, what of its kind is not captured is launched from then
on; if the work itself raises before it is captured, that size is left to plain operations. Both are
noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pippin.backends.fallbacks import Fallbacks
from pippin.backends.torch.device import to_device
from pippin.backends.torch.graphs.capture import CaptureFailed, CudaGraphs, Recorded
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.words import Places, StepSize, StepWords
from pippin.errors import DeviceFailed


class Forwarded(NamedTuple):
    logits: torch.Tensor  # [rows' tokens and chunks, vocab]
    inputs: Inputs  # how these sample
    last: torch.Tensor | None = None  # [chunks, hidden]: what the head read of chunks
    every: torch.Tensor | None = None  # [tokens, hidden], of chunks, or of rows with drafts
    places: Places | None = None  # of rows with drafts


@dataclass(frozen=True)
class Ran:
    """What a step left: overwritten by the next one."""

    drawn: torch.Tensor  # int32 [2, rows and chunks], or [3 + width, rows]: see `StepForward`
    logits: torch.Tensor | None = None  # [rows, vocab], where they are left to the sampler
    last: torch.Tensor | None = None
    every: torch.Tensor | None = None


class StepForward(Protocol):
    def run(self, size: StepSize, words: torch.Tensor) -> Forwarded:
        """Its launches depend on the size alone."""
        ...

    def choose(self, forwarded: Forwarded, choice: Choice) -> torch.Tensor:
        """int32 [2, rows and chunks]: tokens, and whether logits are NaN. Of rows with drafts
        [3 + width, rows]: how many are accepted, the input token's position, whether logits are
        NaN, and what was drawn behind each token."""
        ...


class CapturedSteps:
    """All graphs read one array of words and leave what the sampler and the tree read in the same
    places: they run one after the other."""

    def __init__(
        self,
        forward: StepForward,
        layout: PoolLayout,
        recorder: CudaGraphs | None,  # None: every step is launched
        sizes: Sequence[StepSize],  # the largest of each kind
        device: torch.device,
        fallbacks: Fallbacks | None = None,
    ) -> None:
        def places(num: int, width: int) -> torch.Tensor:
            return torch.empty(num, width, dtype=layout.dtype, device=device)

        self._forward = forward
        self._layout = layout
        self._recorder = recorder
        self._fallbacks = fallbacks or Fallbacks()
        num_words = max(len(self._padding(size)) for size in sizes)
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        num_rows = max(max(size.num_rows, size.num_chunks) for size in sizes)
        self._logits = places(num_rows, layout.shape.vocab_size)
        self._every = places(max(size.num_tokens for size in sizes), layout.shape.hidden)
        self.graphs: dict[tuple[StepSize, Choice], Recorded[Ran]] = {}
        self.refused: set[str] = set()  # kinds whose captures failed
        self.failed: set[StepSize] = set()  # whose work cannot be run: plain operations are left
        self.busy = False  # requests run

    def works(self, size: StepSize) -> bool:
        """Whether steps of its kind can be captured."""
        return self._recorder is not None and size.kind not in self.refused

    def prepare(self, size: StepSize) -> bool:
        """Captures a size if there is time. Whether captures work."""
        return self.can_run(size) and self.works(size)

    def can_run(self, size: StepSize) -> bool:
        """The same; whether `run` may be called, captured or not."""
        if not self.busy:
            self._capture(size, size.choices)
        return size not in self.failed

    def has(self, size: StepSize, choice: Choice) -> bool:
        """Whether that is captured, if need be now."""
        self.prepare(size)
        return (size, choice) in self.graphs

    def run(self, size: StepSize, words: np.ndarray, choice: Choice) -> Ran:
        """words, int32: in one copy, without waiting. What it returns lasts until the next run."""
        if not self.busy:
            self._capture(size, (choice,))
        sent = self._send(words)
        if (graph := self.graphs.get((size, choice))) is None:
            return self._run(size, choice, sent)
        graph.replay()
        return graph.result

    def launch(self, size: StepSize, words: np.ndarray, choice: Choice) -> Ran:
        """Of any size, which is not captured."""
        forwarded = self._forward.run(size, to_device(words, self._words.device))
        logits = forwarded.logits if choice is Choice.LOGITS else None
        drawn = self._forward.choose(forwarded, choice)
        return Ran(drawn, logits, forwarded.last, forwarded.every)

    def _capture(self, size: StepSize, choices: Sequence[Choice]) -> None:
        missing = [choice for choice in choices if (size, choice) not in self.graphs]
        recorder = self._recorder if self.works(size) else None
        if not missing or recorder is None or size in self.failed:
            return
        try:
            words = self._send(self._padding(size))
            forwarded = self._forward.run(size, words)  # it may compile kernels, captures must not
            for choice in missing:
                self._chosen(size, forwarded, choice)
            del forwarded
            for choice in missing:
                run = partial(self._run, size, choice, words)
                self.graphs[size, choice] = recorder.record(run)
        except DeviceFailed:
            raise
        except (CaptureFailed, torch.OutOfMemoryError) as error:  # it can be launched
            self.refused.add(size.kind)
            self._fallbacks.note(f"{size.kind} are launched, not captured", error, error)
        except Exception as error:  # of any kind from a compiler or driver: launched it would raise
            self.failed.add(size)
            what = f"plain operations are used for {size.kind} of some sizes"
            self._fallbacks.note(what, error, error)

    def _run(self, size: StepSize, choice: Choice, words: torch.Tensor) -> Ran:
        return self._chosen(size, self._forward.run(size, words), choice)

    def _chosen(self, size: StepSize, forwarded: Forwarded, choice: Choice) -> Ran:
        drawn, left, every = self._forward.choose(forwarded, choice), None, None
        if choice is Choice.LOGITS:
            firsts = forwarded.logits[:: size.width]
            left = self._logits[: len(firsts)].copy_(firsts)
        if size.num_tokens and forwarded.every is not None:
            every = self._every[: size.num_tokens].copy_(forwarded.every)
        return Ran(drawn, left, forwarded.last, every)

    def _padding(self, size: StepSize) -> np.ndarray:
        return StepWords(size, self._layout).words

    def _send(self, words: np.ndarray) -> torch.Tensor:
        host, on_cuda = torch.from_numpy(words), self._words.is_cuda
        there = self._words[: len(host)]
        there.copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        return there
