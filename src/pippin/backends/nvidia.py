"""Which NVIDIA GPU the driver shows, asked without a library that computes. Makes no context."""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Iterator
from typing import Any

COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
MAX_NAME_BYTES = 256
MAX_ID_BYTES = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE

logger = logging.getLogger(__name__)


def compute_capability() -> tuple[int, int] | None:
    """Of the first GPU that CUDA_VISIBLE_DEVICES leaves, such as (9, 0); None without a GPU."""
    found = [ctypes.c_int() for _ in COMPUTE_CAPABILITY]
    for number, attribute in zip(found, COMPUTE_CAPABILITY, strict=True):
        if not _asked("cuDeviceGetAttribute", ctypes.byref(number), attribute):
            return None
    major, minor = (number.value for number in found)
    return major, minor


def memory_bytes() -> int | None:
    """Of the same GPU, in all."""
    found = ctypes.c_size_t()
    return found.value if _asked("cuDeviceTotalMem_v2", ctypes.byref(found)) else None


def gpu_name() -> str | None:
    """Of the same GPU, such as "NVIDIA H200"."""
    name = ctypes.create_string_buffer(MAX_NAME_BYTES)
    known = _asked("cuDeviceGetName", name, MAX_NAME_BYTES)
    return name.value.decode(errors="replace") if known else None


def _asked(call: str, *arguments: Any) -> bool:
    """Of the GPU, which is the last argument; False: there is none."""
    if (opened := _first_gpu()) is None:
        return False
    driver, device = opened
    if status := getattr(driver, call)(*arguments, device):
        logger.info("%s says %d: no GPU", call, status)
    return not status


def gpu_ids() -> list[str] | None:
    """The UUIDs of all GPUs of this machine, in order of the bus; CUDA_VISIBLE_DEVICES hides none.

    None where there is a GPU whose driver has no NVML, which lists them.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None if _first_gpu() else []
    if library.nvmlInit_v2():
        return []
    try:
        return [*_ids(library)]
    finally:
        library.nvmlShutdown()


def _ids(library: Any) -> Iterator[str]:
    count = ctypes.c_uint()
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for number in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(MAX_ID_BYTES)
        failed = library.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
        failed = failed or library.nvmlDeviceGetUUID(device, name, MAX_ID_BYTES)
        yield "" if failed else name.value.decode()  # its number counts all the same


def _first_gpu() -> tuple[Any, ctypes.c_int] | None:
    """The driver, and the GPU's number there."""
    if platform.system() != "Linux":
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return None
    device = ctypes.c_int()
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (driver.cuInit, (0,)),
        (driver.cuDeviceGet, (ctypes.byref(device), 0)),
    ]
    for call, arguments in calls:
        if status := call(*arguments):
            logger.info("%s says %d: no GPU", call.__name__, status)
            return None
    return driver, device
