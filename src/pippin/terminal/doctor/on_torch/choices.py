"""What loading a model chose on torch, and why; its kernels against plain operations."""

from __future__ import annotations

from collections.abc import Iterator

from pippin import LLM
from pippin.backends.torch.backend import TorchBackend
from pippin.config import Config
from pippin.terminal.doctor.findings import ISSUE, Finding


def choices(llm: LLM) -> Iterator[Finding]:
    config, backend = llm.config, _backend(llm)
    yield Finding("type", f"{dtype_of(llm)}: {_why_dtype(config, backend.device.kind)}")
    if not backend.has_kernels:
        yield Finding("layers", f"plain operations of torch: {_why_plain(config, backend)}")
        return
    graphs = "captured as CUDA graphs" if backend.device.kind == "cuda" else "launched one by one"
    yield Finding("layers", f"Triton kernels, {graphs}")
    for name, off, limit in backend.kernel_errors():
        if off is not None and off <= limit:
            value = f"error {off:.0e}, limit {limit:.0e}"
            yield Finding(name, value, "ok", numbers={"error": off, "limit": limit})
            continue
        yield Finding(
            name,
            "it cannot be run" if off is None else f"error {off:.0e}, limit {limit:.0e}",
            "wrong",
            means="it agreed with plain operations when the model was loaded, and does not now",
            remedy=f"serve with --safe, and {ISSUE}",
        )


def dtype_of(llm: LLM) -> str:
    return _backend(llm).dtype


def is_plain(llm: LLM) -> bool:
    return not _backend(llm).has_kernels


def _backend(llm: LLM) -> TorchBackend:
    backend = llm.loop.backend
    assert isinstance(backend, TorchBackend)
    return backend


def _why_dtype(config: Config, kind: str) -> str:
    if config.model.dtype != "auto":
        return "--dtype"
    return "CPUs compute it fastest" if kind == "cpu" else "as the checkpoint is stored"


def _why_plain(config: Config, backend: TorchBackend) -> str:
    if config.engine.safe:
        return "--safe"
    if backend.device.kind == "cpu":
        return "Triton kernels are for GPUs"
    return "the kernels do not support this model, or differ from plain operations (see warnings)"
