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
_PREFETCHED = tl.constexpr(512)  # bytes that one thread asks for


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


@triton.jit
def prefetch(array, first, num: tl.constexpr, end, PDL: tl.constexpr):
    """Of an array, numbers from `first` on, int64, into the L2 cache, but none from `end` on.

    What a program will read of its weights, before it waits. Both are multiples of 16 bytes.
    """
    if PDL:
        itemsize: tl.constexpr = array.dtype.element_ty.primitive_bitwidth // 8
        each: tl.constexpr = _PREFETCHED // itemsize
        at = first + tl.arange(0, triton.next_power_of_2(triton.cdiv(num, each))) * each
        size = tl.minimum(end - at, each)
        at = tl.where(size > 0, at, first)  # a little twice, in place of a mask
        size = (tl.where(size > 0, size, 16) * itemsize).to(tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [(array + at).to(tl.int64), size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
