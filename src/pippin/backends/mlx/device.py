"""What mlx computes on here, and how much memory that has. Knows no models."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx

from pippin.backends.base import DeviceInfo

# Of the budget, mlx may keep this part as buffers to use again. GPUs' give way to what is needed.
CPU_SPARE_DIVISOR, GPU_SPARE_DIVISOR = 16, 4
CPU_SPARE_BYTES = 128 << 20  # at most


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


def limit_memory(budget_bytes: int) -> int:
    """Tell mlx the budget: it then waits for running work to keep it. What arrays may take of it.

    On GPUs mlx drops spare buffers before it exceeds its limit; on CPUs it keeps them beside it, so
    they are taken off. No memory is wired: wired buffers that come and go as fast as a server's
    panic macOS.
    """
    if on_cpu():
        spare = min(budget_bytes // CPU_SPARE_DIVISOR, CPU_SPARE_BYTES)
        usable = budget_bytes - spare
    else:
        spare, usable = budget_bytes // GPU_SPARE_DIVISOR, budget_bytes
    mx.set_cache_limit(spare)
    mx.set_memory_limit(usable)
    return usable


def host_memory_bytes(cgroup: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = cgroup.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
