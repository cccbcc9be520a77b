"""What torch computes on here, in which type, and how much memory that has."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from pippin.backends.base import DeviceInfo
from pippin.backends.host import host_memory_bytes
from pippin.backends.step.slots import Arrays
from pippin.errors import LoadError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def find_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def has_cuda() -> bool:
    return bool(torch.cuda.is_available()) and torch.version.cuda is not None


def device_info(device: torch.device, prefill_tokens: int | None = None) -> DeviceInfo:
    """`prefill_tokens`: as the user asks. None: what suits it."""
    found = _device_info(device)
    return found if prefill_tokens is None else replace(found, prefill_tokens=prefill_tokens)


def _device_info(device: torch.device) -> DeviceInfo:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            "cuda",
            found.name,
            int(found.total_memory),
            0.85,
            prefill_tokens=8192,
            unified=bool(found.is_integrated),
        )
    name = platform.processor() or platform.machine()
    return DeviceInfo("cpu", name, host_memory_bytes(), 0.5, prefill_tokens=512)


def dtype_of(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """`auto`: what the checkpoint is stored in on GPUs; float32 on CPUs, which compute it fastest.

    Whatever is not one of the three is stored in a way that is not served.
    """
    if name != "auto":
        return DTYPES[name]
    if stored not in DTYPES.values():
        raise LoadError(f"weights of type {stored} are not served: {', '.join(DTYPES)} are")
    return torch.float32 if device.type == "cpu" else stored


def arrays_on(device: torch.device) -> Arrays[torch.Tensor]:
    """What is put somewhere is put in place: steps run in the order of their launches."""

    def put(into: torch.Tensor, at: Any, numbers: torch.Tensor) -> None:
        into[at] = numbers.to(into.dtype)

    return Arrays(
        zeros=partial(torch.zeros, dtype=torch.int32, device=device),
        index=lambda numbers: to_device(numbers.astype(np.int64), device),
        put=put,
        join=lambda parts: torch.cat(list(parts)),
    )


def to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """In their own type; the host does not wait."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
