"""Pippin's operations and recurrences on mlx against plain ones. Loads no model.

The kernels of GPUs depend on a model's shapes: they are checked when it is loaded, and the whole
model against plain operations (replies.py).
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator

import mlx.core as mx

from pippin.backends.host import num_threads
from pippin.backends.mlx.cpu.operations.check import TRIALS
from pippin.backends.mlx.cpu.operations.library import (
    OperationsReport,
    find_library,
    try_operations,
)
from pippin.backends.mlx.device import on_cpu
from pippin.backends.mlx.environment import products_are_exact
from pippin.backends.mlx.recurrent.gated_delta import gated_delta_chunked, gated_delta_step
from pippin.terminal.doctor.findings import ISSUE, SAFE, Finding, checked

# Relative error of a fast recurrence: in float32, and with the ten bits of TF32.
TOLERANCE, TF32_TOLERANCE = 1e-5, 1e-2


def kernels(*, safe: bool) -> Iterator[Finding]:
    if safe:
        yield Finding("operations", "mlx's own, and no kernels of Pippin's: --safe")
    elif on_cpu():
        yield from operations(find_library())
    yield from recurrence()


def operations(found: OperationsReport) -> Iterator[Finding]:
    if found.path is None:
        yield _without_library(found)
        return
    wrong, names = try_operations(found.path), [trial.__name__ for trial in TRIALS]
    right = [name for name in names if name not in wrong]
    yield Finding(
        "operations",
        f"{len(right)} of {len(names)} of Pippin's agree with mlx's, in C++ with "
        f"{num_threads()} threads: {', '.join(right)}",
        "ok" if right else "info",
    )
    for name, why in wrong.items():
        if name in found.left_out:
            yield Finding(
                f"operation {name}",
                f"mlx's own, because Pippin's does not work on this machine: {why}",
                "warning",
                means="`pippin serve` uses mlx's own for it: replies are right and may be slower",
                remedy=ISSUE,
            )
            continue
        yield Finding(
            f"operation {name}",
            f"it agreed with mlx's when it was compiled, and does not now: {why}",
            "wrong",
            means="`pippin serve` computes wrong results",
            remedy=SAFE,
        )


def _without_library(found: OperationsReport) -> Finding:
    value = f"mlx's own: {found.reason}"
    if platform.system() != "Linux":
        return Finding("operations", value)
    has_compiler = shutil.which("g++") is not None
    return Finding(
        "operations",
        value,
        "warning",
        means="replies are right; prompts and decode steps take several times longer",
        remedy=ISSUE if has_compiler else "install g++ (`apt install g++`) and start again",
    )


def recurrence() -> Iterator[Finding]:
    """200 tokens: three whole blocks and a part of one, with gates from shut to open; and one."""
    from mlx_lm.models.gated_delta import gated_delta_ops

    mx.random.seed(0)
    batch, num_tokens, k_heads, v_heads, dim = 2, 200, 2, 4, 64
    q, k = (mx.random.normal((batch, num_tokens, k_heads, dim)) for _ in range(2))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    q = q / mx.linalg.norm(q, axis=-1, keepdims=True)
    v = mx.random.normal((batch, num_tokens, v_heads, dim))
    g, beta = (mx.random.uniform(shape=(batch, num_tokens, v_heads)) for _ in range(2))
    state = mx.random.normal((batch, v_heads, dim, dim))
    for name, fast, n in (
        ("prefill recurrence", gated_delta_chunked, num_tokens),
        ("decode recurrence", gated_delta_step, 1),
    ):
        inputs = (q[:, :n], k[:, :n], v[:, :n], g[:, :n], beta[:, :n], state)
        found, plain = fast(*inputs), gated_delta_ops(*inputs)
        error = max(relative_error(f, p) for f, p in zip(found[:2], plain, strict=True))
        most = TOLERANCE if is_exact() else TF32_TOLERANCE
        yield checked(
            name,
            f"equals the plain one: error {error:.0e}, limit {most:.0e}",
            ok=error < most,
            means="models with Gated DeltaNet layers (Qwen3.5 and others) give wrong replies",
            remedy="start with --deterministic, which rounds no products; " + ISSUE,
            numbers={"error": error, "limit": most},
        )


def is_exact() -> bool:
    return on_cpu() or products_are_exact()


def relative_error(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())
