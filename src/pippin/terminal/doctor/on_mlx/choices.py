"""What loading a model chose on mlx, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear

from pippin import LLM
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations.linear import PackedLinear
from pippin.backends.mlx.describe import describe
from pippin.backends.mlx.device import on_cpu
from pippin.config import Config
from pippin.terminal.doctor.findings import Finding


def choices(llm: LLM) -> Iterator[Finding]:
    config, backend = llm.config, _backend(llm)
    yield Finding("type", f"{dtype_of(llm)}: {_why_dtype(config)}")
    compiled, can_compile = backend.steps_are_compiled, backend.loaded.layout.compiles
    steps = decode_steps(config, compiled=compiled, can_compile=can_compile)
    yield Finding("decode steps", steps)
    yield Finding("products", products(backend.loaded.model))
    for name, value in describe(backend.loaded):
        yield Finding(name, value)


def products(model: Module) -> str:
    """Whose, of how many linear layers."""
    kinds: Counter[str] = Counter()
    for _, part in model.named_modules():
        if isinstance(part, PackedLinear):
            kinds["packed, by Pippin's CPU operation"] += 1
        elif isinstance(part, QuantizedLinear):
            kinds["quantized, by mlx"] += 1
        elif isinstance(part, Linear):
            shared = type(part) is not Linear  # gpu/stacked_linear.py
            kinds["by mlx, one product for layers of one input" if shared else "by mlx"] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


def dtype_of(llm: LLM) -> str:
    return str(_backend(llm).loaded.dtype).removeprefix("mlx.core.")


def _backend(llm: LLM) -> MLXBackend:
    backend = llm.loop.backend
    assert isinstance(backend, MLXBackend)
    return backend


def _why_dtype(config: Config) -> str:
    if config.model.dtype != "auto":
        return "--dtype"
    return "CPUs compute it fastest" if on_cpu() else "as the checkpoint is stored"


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
