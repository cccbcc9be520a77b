"""What mlx computes on here, and how much memory that has. Knows no models."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx

from pippin.backends.base import DeviceInfo

SPARE_BUFFERS_DIVISOR = 16  # of the budget, mlx may keep this part as buffers to use again


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

    No memory is wired: wired buffers that come and go as fast as a server's panic macOS.
    """
    mx.set_memory_limit(budget_bytes)
    mx.set_cache_limit(budget_bytes // SPARE_BUFFERS_DIVISOR)


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
