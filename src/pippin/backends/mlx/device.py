"""What mlx computes on here, and how much memory that has. Knows no models."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

SPARE_BUFFERS_DIVISOR = 16  # of the budget, mlx may keep this part as buffers to use again


@dataclass(frozen=True)
class DeviceInfo:
    kind: Literal["metal", "cuda", "cpu"]
    name: str
    memory_bytes: int  # what one process can reasonably hold
    share: float  # of `memory_bytes` to use when the user does not say
    prefill_tokens: int  # of a step, likewise: enough that products, not launches, take the time


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def device_info() -> DeviceInfo:
    info = mx.device_info(mx.default_device())
    name = str(info.get("device_name", "unknown"))
    if on_cpu():
        return DeviceInfo("cpu", name, host_memory_bytes(), 0.5, prefill_tokens=512)
    if mx.metal.is_available():
        most = int(info["max_recommended_working_set_size"])
        return DeviceInfo("metal", name, most, 0.9, prefill_tokens=2048)
    memory = info.get("total_memory") or info.get("memory_size") or host_memory_bytes()
    return DeviceInfo("cuda", name, int(memory), 0.85, prefill_tokens=8192)


def limit_memory(budget_bytes: int) -> None:
    """Tell mlx the budget: it then waits for running work, and drops spare buffers, to keep it.

    On Metal memory up to the budget is wired, so that the system does not page the weights out.
    """
    mx.set_memory_limit(budget_bytes)
    mx.set_cache_limit(budget_bytes // SPARE_BUFFERS_DIVISOR)
    if mx.metal.is_available():
        most = int(mx.device_info(mx.default_device())["max_recommended_working_set_size"])
        mx.set_wired_limit(min(budget_bytes, most))


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
