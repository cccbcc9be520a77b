"""Work over words by key: replayed where it is captured, launched where it is not. Knows no model.

While no request runs, work is captured before it is first needed. While requests run, a key is
launched the first time, which compiles its kernels, and captured the second: that is a few
milliseconds of the host's and waits for nothing. Where a capture fails this says so once, captures
no more, and launches what is not captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import numpy as np
import torch

from pippin.backends.torch.graphs.capture import Recorded, Recorder
from pippin.errors import DeviceFailed

logger = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


class Replays(Generic[Key, Result]):
    """All graphs read one array of words: they run one after the other."""

    def __init__(
        self,
        name: str,
        recorder: Recorder | None,  # None: nothing is captured
        words: torch.Tensor,  # int32, on the device: as many as the largest key reads
        padding: Callable[[Key], np.ndarray],  # words of no rows
        run: Callable[[Key, torch.Tensor], Result],  # over as many words as the padding has
    ) -> None:
        self._name = name
        self._recorder = recorder
        self._words = words
        self._padding = padding
        self._run = run
        self._has_run: set[Key] = set()
        self.graphs: dict[Key, Recorded[Result]] = {}
        self.works = recorder is not None
        self.busy = False  # requests run

    def prepare(self, keys: Iterable[Key]) -> bool:
        """Captures these if there is time. Whether captures work."""
        for key in keys if not self.busy else ():
            self._capture(key)
        return self.works

    def run(self, key: Key, words: np.ndarray) -> Result:
        """words, int32: in one copy, without waiting. What it returns lasts until the next run."""
        if not self.busy or key in self._has_run:
            self._capture(key)
        sent = self._send(words)
        if (graph := self.graphs.get(key)) is None:
            result = self._run(key, sent)
            self._has_run.add(key)
            return result
        graph.replay()
        return graph.result

    def _capture(self, key: Key) -> None:
        if key in self.graphs or self._recorder is None or not self.works:
            return
        try:
            words = self._send(self._padding(key))
            if key not in self._has_run:  # it may compile kernels, which a capture must not
                self._run(key, words)
                self._has_run.add(key)
            self.graphs[key] = self._recorder.record(lambda: self._run(key, words))
        except DeviceFailed:
            raise
        except Exception as error:  # whatever a driver says: it can be launched
            self.works = False
            logger.warning("%s are not captured: %s", self._name, error, exc_info=error)

    def _send(self, words: np.ndarray) -> torch.Tensor:
        host, on_cuda = torch.from_numpy(words).view(-1), self._words.is_cuda
        there = self._words[: len(host)]
        there.copy_(host.pin_memory() if on_cuda else host, non_blocking=on_cuda)
        return there
