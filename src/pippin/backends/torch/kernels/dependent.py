"""Programmatic dependent launch: a kernel's programs start while the kernel before it still runs.

    allow_next          the programs of the kernel behind this one may start
    wait_for_previous   from here on all that earlier kernels wrote can be read

NVIDIA GPUs have it from sm_90 on, also inside captured graphs. Every kernel of a step waits, so
that when one has ended all before it have. What it reads before it waits, its weights above all,
was written before the step; and since the first kernel of a step allows no other to start before it
has waited itself, that includes all that earlier steps wrote.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LEAST_CAPABILITY = (9, 0)


@cache
def _has_it(device: torch.device) -> bool:
    return device.type == "cuda" and bool(
        torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    )


def dependent(device: torch.device) -> dict[str, Any]:
    """Arguments of a kernel that calls `wait_for_previous`."""
    return {"PDL": True, "launch_pdl": True} if _has_it(device) else {"PDL": False}


@triton.jit
def allow_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
