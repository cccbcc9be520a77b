"""Where work runs: the forward's stream, and one for copies each way. Null off CUDA.

    forward   everything that reads or writes pools, states, tokens: in the order of launches
    copy      results and spilled bytes to pinned host memory, behind the step that made them
    load      bytes from another tier, out of pinned host memory, beside the step that takes them

The schedule has no stream: nothing but `launch` touches the device, and the few words that it sends
go out on the forward stream itself, ahead of the work that reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch


class Arrival(Protocol):
    def wait(self) -> list[torch.Tensor]:
        """On the host, once the step that makes them has run; no later step is waited for."""
        ...


class Sending(Protocol):
    def arrive(self) -> list[torch.Tensor]:
        """On the device, for what is launched on the forward stream from now on."""
        ...


class Streams(Protocol):
    def forward(self) -> AbstractContextManager[None]: ...

    def bring(self, results: Sequence[torch.Tensor]) -> Arrival: ...

    def send(self, data: Sequence[torch.Tensor]) -> Sending:
        """Copies, on their way to the device. Nobody changes `data` until they have arrived."""
        ...


class Arrived:
    """Results that are there already."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        self._results = list(results)

    def wait(self) -> list[torch.Tensor]:
        return self._results

    arrive = wait


class NullStreams:
    """A CPU has finished its work when the call returns.

    `onednn`: False where that library does not multiply in the model's type. Torch would try it for
    each product of matrices, fail, warn and use its own kernel.
    """

    def __init__(self, *, onednn: bool = True) -> None:
        self._onednn = onednn

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self._onednn:
            yield
            return
        before, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
        try:
            yield
        finally:
            torch.backends.mkldnn.set_flags(_enabled=before)

    def bring(self, results: Sequence[torch.Tensor]) -> Arrival:
        return Arrived(results)

    def send(self, data: Sequence[torch.Tensor]) -> Sending:
        return Arrived([part.clone() for part in data])


class CudaArrival:
    def __init__(self, results: list[torch.Tensor], event: torch.cuda.Event) -> None:
        self._results = results
        self._event = event

    def wait(self) -> list[torch.Tensor]:
        self._event.synchronize()
        return self._results


class CudaSending:
    def __init__(
        self, sent: list[torch.Tensor], event: torch.cuda.Event, forward: torch.cuda.Stream
    ) -> None:
        self._sent = sent
        self._event = event
        self._forward = forward

    def arrive(self) -> list[torch.Tensor]:
        self._forward.wait_event(self._event)
        for part in self._sent:
            part.record_stream(self._forward)
        return self._sent


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
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
        return CudaArrival(arrived, event)

    def send(self, data: Sequence[torch.Tensor]) -> Sending:
        with torch.cuda.stream(self._load):
            sent = [part.to(self._device, non_blocking=True) for part in data]
            event = torch.cuda.Event()
            event.record(self._load)
        return CudaSending(sent, event, self._forward)


def make_streams(device: torch.device, dtype: torch.dtype) -> NullStreams | CudaStreams:
    if device.type == "cuda":
        return CudaStreams(device)
    return NullStreams(onednn=dtype != torch.bfloat16 or has_bfloat16_products())


def has_bfloat16_products() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU: not on ARM before version 8.6."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
