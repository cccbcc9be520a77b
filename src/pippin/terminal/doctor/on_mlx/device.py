"""What mlx computes on, its memory and its limits, and what a launch takes. Loads no model."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from pippin.amounts import show_bytes
from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.device import device_info, max_buffers, on_cpu, on_metal
from pippin.backends.mlx.environment import TF32, products_are_exact
from pippin.terminal.doctor.findings import Finding
from pippin.terminal.doctor.launches import CHAIN, PRODUCT_SIZE, launch_findings, product_finding


def device() -> Iterator[Finding]:
    found, info = device_info(), mx.device_info(mx.default_device())
    yield _kind(found.kind, found.name, info)
    yield Finding(
        "memory",
        f"{show_bytes(found.memory_bytes)}; --memory auto uses {found.share:.0%} of it",
        numbers={"memory_bytes": found.memory_bytes, "share": found.share},
    )
    if on_metal():
        yield from _metal_limits(info)
    if not on_cpu():
        yield Finding("TF32", tf32())
    if on_cpu() and platform.system() == "Linux":
        yield _blas()


def _kind(kind: str, name: str, info: Mapping[str, Any]) -> Finding:
    architecture = info.get("architecture")
    value = f"{kind}: {name}" + (f" ({architecture})" if architecture else "")
    if platform.system() == "Darwin" and kind == "cpu":
        return Finding(
            "device",
            value,
            "warning",
            means="mlx computes on the CPU: Metal is not used, and everything is slow",
            remedy="use macOS 14 or newer on Apple Silicon, outside of virtual machines without a "
            "GPU; MLX_DEFAULT_DEVICE must not be cpu",
        )
    return Finding("device", value)


def _metal_limits(info: Mapping[str, Any]) -> Iterator[Finding]:
    """As far as mlx tells them."""
    whole = info.get("memory_size")
    recommended = int(info["max_recommended_working_set_size"])
    value = show_bytes(recommended)
    numbers = {"working_set_bytes": float(recommended)}
    if whole:
        value += f" of {show_bytes(int(whole))}; `sudo sysctl iogpu.wired_limit_mb=N` raises it"
        numbers["total_bytes"] = float(whole)
    yield Finding("Metal working set", value, numbers=numbers)
    if "max_buffer_length" in info:
        longest = int(info["max_buffer_length"])
        yield Finding(
            "Metal maxBufferLength",
            f"{show_bytes(longest)} in one array",
            numbers={"buffer_bytes": longest},
        )
    buffers = max_buffers()
    if buffers is not None:
        yield Finding(
            "Metal buffers",
            f"at most {buffers:,} for prompts and the prefix cache",
            numbers={"buffers": buffers},
        )


def tf32() -> str:
    """In these checks and in `pippin serve`."""
    value = os.environ.get(TF32)
    if value is None:
        return "on, the default of mlx, here and in pippin serve; --deterministic turns it off"
    return f"{'off' if products_are_exact() else 'on'}: {TF32}={value}, here and in pippin serve"


def _blas() -> Finding:
    blas = load_fast_blas()
    if blas.loaded:
        return Finding("BLAS", f"{blas.name}, {blas.threads} threads")
    return Finding(
        "BLAS",
        f"{blas.name} ({blas.reason})",
        "warning",
        means="matrix products are some fifty times slower than they could be",
        remedy="pip install 'pippin[cpu]', and unset PIPPIN_BLAS",
    )


def launches() -> Iterator[Finding]:
    one, n = mx.zeros(1), PRODUCT_SIZE
    a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
    mx.eval(a, b)
    yield from launch_findings(
        lambda: mx.eval(one + 1), lambda: mx.eval(_chain(one)), lambda: mx.eval(a @ b)
    )
    error = float(np.abs(np.array(a @ b) - np.array(a) @ np.array(b)).max())
    yield product_finding(error)


def _chain(x: mx.array) -> mx.array:
    for _ in range(CHAIN):
        x = x + 1
    return x
