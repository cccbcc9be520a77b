"""What loading a model chose on mlx, and why; its device, and Pippin's operations on it."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from pippin import LLM
from pippin.amounts import show_bytes
from pippin.backends.host import num_threads
from pippin.backends.mlx.attention.views import reads_table
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.blas import load_fast_blas
from pippin.backends.mlx.cpu.layers import PackedLinear
from pippin.backends.mlx.cpu.operations import OperationsReport, find_operations
from pippin.backends.mlx.device import device_info, max_buffers, on_cpu, on_metal
from pippin.backends.mlx.environment import TF32, products_are_exact
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.load import LoadedModel
from pippin.backends.mlx.recurrent.recurrences import gated_delta_chunked, gated_delta_step
from pippin.config import Config
from pippin.terminal.doctor import ISSUE, Finding, checked
from pippin.terminal.doctor.engine import (
    PRODUCT_SIZE,
    chain,
    launch_findings,
    memory_finding,
    type_finding,
)


def choices(llm: LLM) -> Iterator[Finding]:
    config, backend = llm.config, _backend(llm)
    yield type_finding(llm, dtype_of(llm), on_cpu=on_cpu())
    compiled, can_compile = backend.steps_are_compiled, backend.loaded.layout.compiles
    steps = decode_steps(config, compiled=compiled, can_compile=can_compile)
    yield Finding("decode steps", steps)
    yield Finding("products", products(backend.loaded.model))
    for name, value in described(backend.loaded):
        yield Finding(name, value)


def described(loaded: LoadedModel) -> Iterator[tuple[str, str]]:
    """The name of each thing chosen, and a line about it."""
    with loaded.operating():
        by_table = reads_table(loaded.layout)
    gathers = loaded.attention.kernel is None and not by_table
    yield "attention", attention_of(loaded.layout, gathers=gathers)
    if loaded.layout.state_indices:
        yield "recurrence", recurrence_of(safe=loaded.safe)


def attention_of(layout: Layout, *, gathers: bool = False) -> str:
    caches = [cache for cache in layout.caches if not cache.is_state]
    own = sum(not cache.splits for cache in caches)
    if not caches:
        return "none: every layer is recurrent"
    if own == 0:
        latent = any(cache.reads is Reads.LATENT for cache in caches)
        layers = f"{_count(len(caches), 'layer')}{' over latents' if latent else ''}"
        how = "plain operations copy KV in each step, slower" if gathers else "KV is not copied"
        return f"{layers} through mlx-lm's function: {how}"
    attend = "layer attends in its" if len(caches) == 1 else "layers attend in their"
    return f"{own} of {len(caches)} {attend} own way: concatenated KV each step, slower"


def recurrence_of(*, safe: bool) -> str:
    if safe:
        return "ours, in plain operations: --safe"
    if on_metal():
        return "mlx-lm's kernels for the shapes that they take, else ours"
    return "ours: mlx-lm has no kernels here"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def products(model: Module) -> str:
    """Whose, of how many linear layers."""
    kinds: Counter[str] = Counter()
    for _, part in model.named_modules():
        if isinstance(part, PackedLinear):
            kinds["packed, by Pippin's CPU operation"] += 1
        elif isinstance(part, QuantizedLinear):
            kinds["quantized, by mlx"] += 1
        elif isinstance(part, Linear):
            shared = type(part) is not Linear  # linear_groups.py
            kinds["by mlx, one product for layers of one input" if shared else "by mlx"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


def dtype_of(llm: LLM) -> str:
    return str(_backend(llm).loaded.dtype).removeprefix("mlx.core.")


def _backend(llm: LLM) -> MLXBackend:
    backend = llm.loop.backend
    assert isinstance(backend, MLXBackend)
    return backend


def is_plain(llm: LLM) -> bool:
    return False


def rounds_products(llm: LLM) -> bool:
    return llm.loop.backend.device.kind != "cpu" and not products_are_exact()


def decode_steps(config: Config, *, compiled: bool, can_compile: bool = True) -> str:
    if compiled:
        return "compiled, as in pippin serve"
    if not can_compile:
        return "not compiled: the model's own code reads values back inside a step"
    if config.engine.safe:
        return "not compiled: --safe"
    if config.engine.deterministic:
        return "not compiled: --deterministic"
    return "not compiled, as in pippin serve: mlx cannot be asked to compile without a C++ compiler"


# Relative error of a fast recurrence: in float32, and with the ten bits of TF32.
TOLERANCE, TF32_TOLERANCE = 1e-5, 1e-2


def kernels(*, safe: bool) -> Iterator[Finding]:
    if safe:
        yield Finding("operations", "mlx's own, and no kernels of Pippin's: --safe")
    elif on_cpu():
        yield operations(find_operations())
    yield from recurrence()


def operations(found: OperationsReport) -> Finding:
    if found.module is not None:
        return Finding("operations", f"Pippin's, in C++ with {num_threads()} threads")
    value = f"mlx's own: {found.reason}"
    if platform.system() != "Linux":
        return Finding("operations", value)
    return Finding(
        "operations",
        value,
        "warning",
        means="replies are right; prompts and decode steps take several times longer",
        remedy="install g++ (`apt install g++ python3-dev`) and pippin[cpu], and start again",
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
        most = TOLERANCE if on_cpu() or products_are_exact() else TF32_TOLERANCE
        yield checked(
            name,
            f"equals the plain one: error {error:.0e}, limit {most:.0e}",
            {"error": error, "limit": most},
            ok=error < most,
            means="models with Gated DeltaNet layers (Qwen3.5 and others) give wrong replies",
            remedy="start with --deterministic, which rounds no products; " + ISSUE,
        )


def relative_error(actual: mx.array, expected: mx.array) -> float:
    return float(mx.abs(actual - expected).max() / mx.abs(expected).max())


def device() -> Iterator[Finding]:
    found, info = device_info(), mx.device_info(mx.default_device())
    yield _kind(found.kind, found.name, info)
    yield memory_finding(found)
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
        remedy="install g++ and pippin[cpu], and unset PIPPIN_BLAS",
    )


def launches() -> Iterator[Finding]:
    one, n = mx.zeros(1), PRODUCT_SIZE
    a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
    mx.eval(a, b)
    yield from launch_findings(
        lambda: mx.eval(one + 1),
        lambda: mx.eval(chain(one)),
        lambda: mx.eval(a @ b),
        lambda: float(np.abs(np.array(a @ b) - np.array(a) @ np.array(b)).max()),
    )
