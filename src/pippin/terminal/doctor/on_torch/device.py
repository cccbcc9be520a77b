"""What torch computes on, its memory, and what a launch takes. Loads no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pippin.amounts import show_bytes
from pippin.backends.nvidia import compute_capability
from pippin.backends.torch.device import device_info, find_device
from pippin.terminal.doctor.findings import Finding
from pippin.terminal.doctor.launches import CHAIN, PRODUCT_SIZE, launch_findings, product_finding


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
    yield Finding(
        "memory",
        f"{show_bytes(found.memory_bytes)}; --memory auto uses {found.share:.0%} of it",
        numbers={"memory_bytes": found.memory_bytes, "share": found.share},
    )
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
            _waited(lambda: one + 1), _waited(lambda: _chain(one)), _waited(lambda: a @ b)
        )
        error = np.abs((a @ b).cpu().numpy() - a.cpu().numpy() @ b.cpu().numpy()).max()
    yield product_finding(float(error))


def _waited(compute: Callable[[], torch.Tensor]) -> Callable[[], None]:
    def work() -> None:
        if compute().is_cuda:
            torch.cuda.synchronize()

    return work


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(CHAIN):
        x = x + 1
    return x
