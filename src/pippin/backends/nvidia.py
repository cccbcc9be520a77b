"""Which NVIDIA GPU the driver shows, asked without a library that computes. Makes no context."""

from __future__ import annotations

import ctypes
import logging
import platform
from typing import Any

COMPUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR

logger = logging.getLogger(__name__)


def compute_capability() -> tuple[int, int] | None:
    """Of the first GPU that CUDA_VISIBLE_DEVICES leaves, such as (9, 0); None without a GPU."""
    if (opened := _first_gpu()) is None:
        return None
    driver, device = opened
    found = [ctypes.c_int() for _ in COMPUTE_CAPABILITY]
    for number, attribute in zip(found, COMPUTE_CAPABILITY, strict=True):
        if status := driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            logger.info("cuDeviceGetAttribute says %d: no GPU", status)
            return None
    major, minor = (number.value for number in found)
    return major, minor


def memory_bytes() -> int | None:
    """Of the same GPU, in all."""
    if (opened := _first_gpu()) is None:
        return None
    driver, device = opened
    found = ctypes.c_size_t()
    if status := driver.cuDeviceTotalMem_v2(ctypes.byref(found), device):
        logger.info("cuDeviceTotalMem says %d: no GPU", status)
        return None
    return found.value


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
