"""Work that is recorded once and replayed: CUDA graphs. Knows no model and no steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class Recorded(Generic[Result]):
    result: Result  # tensors that each replay overwrites
    replay: Callable[[], None]


class Recorder(Protocol):
    def record(self, run: Callable[[], Result]) -> Recorded[Result]:
        """`run` reads and writes tensors that stay where they are; it has run before."""
        ...


class CudaGraphs:
    """Graphs of one memory: what one replay left is gone when another has run."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> Recorded[Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=torch.cuda.current_stream(),
            capture_error_mode="thread_local",  # other threads may call CUDA meanwhile
        ):
            result = run()
        return Recorded(result, graph.replay)
