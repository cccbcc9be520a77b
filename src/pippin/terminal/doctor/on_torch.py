"""What loading a model chose on torch, and why; its device, and Pippin's kernels on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pippin import LLM
from pippin.amounts import show_bytes
from pippin.backends.nvidia import compute_capability
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.device import device_info, find_device
from pippin.config import Config
from pippin.terminal.doctor import ISSUE, Finding
from pippin.terminal.doctor.engine import (
    PRODUCT_SIZE,
    chain,
    launch_findings,
    memory_finding,
    type_finding,
)


def choices(llm: LLM) -> Iterator[Finding]:
    config, backend = llm.config, _backend(llm)
    yield type_finding(llm, backend.dtype, on_cpu=backend.device.kind == "cpu")
    if not backend.has_kernels:
        yield Finding("layers", f"plain operations of torch: {_why_plain(config, backend)}")
        return
    graphs = "captured as CUDA graphs" if backend.device.kind == "cuda" else "launched one by one"
    yield Finding("layers", f"Triton kernels, {graphs}")
    for name, off, limit in backend.kernel_errors():
        if off is not None and off <= limit:
            value = f"error {off:.0e}, limit {limit:.0e}"
            yield Finding(name, value, "ok", numbers={"error": off, "limit": limit})
            continue
        yield Finding(
            name,
            "it cannot be run" if off is None else f"error {off:.0e}, limit {limit:.0e}",
            "wrong",
            means="it agreed with plain operations when the model was loaded, and does not now",
            remedy=f"serve with --safe, and {ISSUE}",
        )


def dtype_of(llm: LLM) -> str:
    return _backend(llm).dtype


def is_plain(llm: LLM) -> bool:
    return not _backend(llm).has_kernels


def rounds_products(llm: LLM) -> bool:
    return False


def _backend(llm: LLM) -> TorchBackend:
    backend = llm.loop.backend
    assert isinstance(backend, TorchBackend)
    return backend


def _why_plain(config: Config, backend: TorchBackend) -> str:
    if config.engine.safe:
        return "--safe"
    if backend.device.kind == "cpu":
        return "Triton kernels are for GPUs"
    return "the kernels do not support this model, or differ from plain operations (see warnings)"


def device() -> Iterator[Finding]:
    found = device_info(find_device())
    value = f"{found.kind}: {found.name}"
    if found.kind == "cpu" and compute_capability() is not None:
        yield Finding(
            "device",
            value,
            "warning",
            means="there is an NVIDIA GPU, and this torch does not use it",
            remedy="install a torch for CUDA (the wheel for Linux on PyPI), or update the driver",
        )
    else:
        yield Finding("device", value)
    yield memory_finding(found)
    if found.kind == "cuda":
        free, _ = torch.cuda.mem_get_info()
        yield Finding("free memory", show_bytes(free), numbers={"free_bytes": free})
    else:
        yield Finding("threads", str(torch.get_num_threads()))


def launches() -> Iterator[Finding]:
    where, n = find_device(), PRODUCT_SIZE
    one = torch.zeros(1, device=where)
    a, b = torch.randn(n, n, device=where), torch.randn(n, n, device=where)
    with torch.inference_mode():
        yield from launch_findings(
            _waited(lambda: one + 1),
            _waited(lambda: chain(one)),
            _waited(lambda: a @ b),
            lambda: float(np.abs((a @ b).cpu().numpy() - a.cpu().numpy() @ b.cpu().numpy()).max()),
        )


def _waited(compute: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def work() -> None:
        if compute().is_cuda:
            torch.cuda.synchronize()

    return work
