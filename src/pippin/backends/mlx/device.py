"""What mlx computes on here, and how much memory that has."""

from __future__ import annotations

import platform
import re

import mlx.core as mx

from pippin.backends.base import DeviceInfo
from pippin.backends.host import host_memory_bytes

# What mlx may keep as buffers to use again: on CPUs a part of the budget; on GPUs, where they give
# way to what is needed, a part of what the weights leave of it.
CPU_SPARE_DIVISOR, CUDA_SPARE_DIVISOR = 16, 4
CPU_SPARE_BYTES = 128 << 20  # at most
# To give a buffer back and get another is slow on Metal. What comes and goes: activations, a tenth;
# a move of rows, 30% of them; tails and states, one step's for the next one's.
METAL_SPARE_DIVISOR = 2
# Of the buffers that Metal allows, what prompts and the tree may hold. The rest is for weights, for
# running steps, for buffers that wait to be used again, and for prompts' last hidden vectors.
LIVE_BUFFERS_DIVISOR = 2
# Metal tells an architecture, `applegpu_g15s`: generation 15 (M3) and a size. Not the cores, of
# which these are the most that a size was sold with: phones, M and Pro, Max, Ultra.
APPLE_GPU = re.compile(r"applegpu_g(\d+)(\w)")
APPLE_CORES = {"p": 6, "g": 20, "s": 40, "d": 80}
OTHER_CORES = APPLE_CORES["g"]
MATRIX_UNITS_SINCE = 17  # M5; phones one later, and macOS 26.2: mlx/backend/metal/device.cpp


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


def on_metal() -> bool:
    return bool(mx.metal.is_available()) and not on_cpu()


def device_info() -> DeviceInfo:
    info = mx.device_info(mx.default_device())
    name = str(info.get("device_name", "unknown"))
    if on_cpu():
        return DeviceInfo("cpu", name, host_memory_bytes(), 0.5, prefill_tokens=512)
    if on_metal():
        most = int(info["max_recommended_working_set_size"])
        limit = info.get("resource_limit")
        buffers = None if limit is None else int(limit)
        longest = info.get("max_buffer_length")
        return DeviceInfo(
            *("metal", name, most, 0.9),
            prefill_tokens=2048,
            max_buffers=buffers,
            max_buffer_bytes=None if longest is None else int(longest),
        )
    memory = info.get("total_memory") or info.get("memory_size") or host_memory_bytes()
    return DeviceInfo("cuda", name, int(memory), 0.85, prefill_tokens=8192, unified=False)


def _architecture() -> re.Match[str] | None:
    return APPLE_GPU.fullmatch(str(mx.device_info(mx.default_device()).get("architecture")))


def gpu_cores() -> int:
    """Of an Apple GPU, about."""
    found = _architecture()
    return OTHER_CORES if found is None else APPLE_CORES.get(found[2], OTHER_CORES)


def has_matrix_units() -> bool:
    """Whether mlx has kernels for the matrix units of this Apple GPU."""
    found = _architecture()
    if found is None:
        return False
    system = tuple(int(part) for part in platform.mac_ver()[0].split(".") if part)
    return int(found[1]) >= MATRIX_UNITS_SINCE + (found[2] == "p") and system >= (26, 2)


def limit_memory(budget_bytes: int, used_bytes: int = 0) -> int:
    """Tell mlx the budget: it then waits for running work to keep it. What arrays may take of it.

    `used_bytes`: what is there for good, the weights. On GPUs mlx drops spare buffers before it
    exceeds its limit; on CPUs it keeps them beside it, so they are taken off.
    """
    usable = budget_bytes
    if on_cpu():
        spare = min(budget_bytes // CPU_SPARE_DIVISOR, CPU_SPARE_BYTES)
        usable -= spare
    else:
        divisor = METAL_SPARE_DIVISOR if on_metal() else CUDA_SPARE_DIVISOR
        spare = max(budget_bytes - used_bytes, 0) // divisor
    mx.set_cache_limit(spare)
    mx.set_memory_limit(usable)
    return usable


def wire(num_bytes: int) -> None:
    """Keep the buffers there are from being swapped out. Only Metal knows such a thing.

    No more than these: mlx wires what fits its limit, and wired buffers that come and go as fast as
    a server's panic macOS.
    """
    if on_metal():
        most = int(mx.device_info(mx.default_device())["max_recommended_working_set_size"])
        mx.set_wired_limit(min(num_bytes, most))


def max_buffers() -> int | None:
    """How many buffers prompts and the tree may hold; None where there is no limit."""
    limit = device_info().max_buffers
    return None if limit is None else limit // LIVE_BUFFERS_DIVISOR
