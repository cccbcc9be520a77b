"""Where work runs: the forward's stream, and one for copies each way. On a CPU there are none.

    forward   everything that reads or writes pools, states, tokens: in the order of launches
    copy      results and spilled bytes to pinned host memory, behind the step that made them
    load      bytes from another tier, out of pinned host memory, beside the step that takes them

The schedule has no stream: nothing but `launch` touches the device, and the few words that it sends
go out on the forward stream itself, ahead of the work that reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrival:
    """Copies on their way."""

    copies: list[torch.Tensor]
    arrive: Callable[[], None] = lambda: None  # returns when they may be read

    def wait(self) -> list[torch.Tensor]:
        self.arrive()
        return self.copies


class Streams:
    """Of a CPU, which has finished its work when the call returns.

    `onednn`: False where that library does not multiply in the model's type. Torch would try it for
    each product of matrices, fail, warn and use its own kernel.
    """

    def __init__(self, *, onednn: bool = True) -> None:
        self._onednn = onednn

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Where all runs that reads or writes pools."""
        if self._onednn:
            yield
            return
        before, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before)

    def bring(self, results: Sequence[torch.Tensor]) -> Arrival:
        """To the host. `wait` returns when the step that makes them has run, whatever follows."""
        return Arrival(list(results))

    def send(self, data: Sequence[torch.Tensor]) -> Arrival:
        """To the device; `data` stays as it is until the step that waits for it has run.

        `wait` makes what is launched on the forward stream from then on wait, not the host.
        """
        return Arrival([part.clone() for part in data])


class CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._forward = torch.cuda.Stream(device)
        self._copy = torch.cuda.Stream(device)
        self._load = torch.cuda.Stream(device)  # its own: results do not queue behind it
        torch.cuda.synchronize(device)  # weights were sent on another stream

    @contextmanager
    def forward(self) -> Iterator[None]:
        with torch.cuda.stream(self._forward):
            yield

    def bring(self, results: Sequence[torch.Tensor]) -> Arrival:
        """The results are tensors of their own, which no later step writes."""
        made = torch.cuda.Event()
        made.record(self._forward)
        self._copy.wait_event(made)
        with torch.cuda.stream(self._copy):
            arrived = []
            for result in results:
                result.record_stream(self._copy)  # not to be given to another step before
                host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                arrived.append(host.copy_(result, non_blocking=True))
            event = torch.cuda.Event()
            event.record(self._copy)
        return Arrival(arrived, event.synchronize)

    def send(self, data: Sequence[torch.Tensor]) -> Arrival:
        with torch.cuda.stream(self._load):
            sent = [part.to(self._device, non_blocking=True) for part in data]
            event = torch.cuda.Event()
            event.record(self._load)

        def arrive() -> None:
            self._forward.wait_event(event)
            for part in sent:
                part.record_stream(self._forward)

        return Arrival(sent, arrive)


def make_streams(device: torch.device, dtype: torch.dtype) -> Streams:
    if device.type == "cuda":
        return CudaStreams(device)
    return Streams(onednn=dtype != torch.bfloat16 or has_bfloat16_products())


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU: not on ARM before version 8.6."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
