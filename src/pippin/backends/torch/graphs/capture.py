"""Work that is recorded once and replayed: CUDA graphs.

A capture that fails leaves nothing behind: neither the stream nor torch's allocator is in capture
mode afterwards, and the same work can be launched instead.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from pippin.errors import DeviceFailed

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class CaptureFailed(Exception):
    """Nothing of the capture is left."""


@dataclass(frozen=True)
class Recorded(Generic[Result]):
    result: Result  # tensors that each replay overwrites
    replay: Callable[[], None]


class CudaGraphs:
    """Graphs of one memory: what one replay left is gone when another has run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Result]) -> Recorded[Result]:
        """`run` reads and writes tensors that stay where they are; it has run before.

        Raises CaptureFailed where that cannot be recorded, and DeviceFailed if nothing can be run
        any more. Does not wait for the device unless it fails.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with _no_collections():
                # Other threads may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = run()
                finally:
                    graph.capture_end()
        except Exception as error:
            self._clean_up(graph, error)
            raise CaptureFailed(str(error) or repr(error)) from error
        return Recorded(result, graph.replay)

    def _clean_up(self, graph: torch.cuda.CUDAGraph, cause: Exception) -> None:
        """What torch leaves of a capture that CUDA refused to begin or to end.

        In capture mode its allocator never reuses a block that another stream has read.
        """
        if torch.cuda.is_current_stream_capturing():
            self._attempt(graph.capture_end)
        device = torch.cuda.current_device() if self._device.index is None else self._device.index
        if self._attempt(lambda: torch._C._cuda_endAllocateToPool(device, self._pool)):
            torch._C._cuda_releasePool(device, self._pool)
        # A released pool whose blocks are still held (by `cause`) takes no other capture.
        self._pool = torch.cuda.graph_pool_handle()
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # it may count for the graph
        self._attempt(lambda: torch.cuda.synchronize(self._device))  # reads the error: it is gone
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            works = torch.ones(1, device=self._device).item() == 1.0
        except RuntimeError as error:
            raise DeviceFailed(
                f"the GPU fails since a CUDA graph could not be captured ({cause}): {error}"
            ) from cause
        assert works

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Whether it was needed: CUDA and torch refuse to end what has ended."""
        try:
            call()
        except RuntimeError as error:
            logger.debug("after a failed capture: %s", error)
            return False
        return True


@contextmanager
def _no_collections() -> Iterator[None]:
    """A collection may free what CUDA does not let go of during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
