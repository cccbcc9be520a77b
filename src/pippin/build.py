"""Puts a backend, a prefix cache and a scheduler together. Knows no processes and no text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pippin.backends.base import Backend
from pippin.cache.canary import Canary
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.config import Config, EngineConfig, parse_memory
from pippin.errors import LoadError
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Limits, Scheduler
from pippin.types import ModelSpec

TRANSIENT_SHARE = 0.1  # of what the weights leave: activations and copies on their way
SEQUENCES_TO_HOLD = 4  # the states of one long prompt may not fill the tree alone
FAKE_MAX_LEN = 8192
MIN_CAPACITY_BYTES = 64 * 2**20  # below this not even short requests would run

Progress = Callable[[str], None]  # hears the name of each stage of a load


def build_loop(
    config: Config, progress: Progress, *, stays: bool = False, backend: Backend | None = None
) -> Loop:
    """Load the model and put a scheduler on it, for an engine process (`stays`) or for `LLM`.

    A `backend` that is given has been loaded already.
    """
    backend = backend or load_backend(config, progress, stays=stays)
    capacity_bytes = _capacity_bytes(config, backend)
    limits = Limits(
        max_running=config.engine.max_running,
        max_queue=config.engine.max_queue,
        prefill_tokens=config.engine.prefill_tokens or _default_prefill_tokens(config),
        deterministic=config.engine.deterministic,
        capacity_bytes=capacity_bytes,
    )
    cache = _build_cache(config.engine, backend.spec, capacity_bytes)
    return Loop(Scheduler(backend.spec, limits, cache), backend, overlap=config.engine.overlap)


def _default_prefill_tokens(config: Config) -> int:
    if config.model.backend == "fake":
        return Limits.prefill_tokens
    from pippin.backends.mlx.device import device_info

    return device_info().prefill_tokens


def _build_cache(config: EngineConfig, spec: ModelSpec, capacity_bytes: int) -> PrefixCache | None:
    if not config.prefix_cache:
        return None
    canary = Canary(config.canary)
    if canary.mode != "off":
        canary.self_test()
    return PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=capacity_bytes,
        canary=canary,
        policy=CheckpointPolicy(
            spec.state_bytes,
            spec.kv_bytes_per_token,
            prompt_budget_bytes=capacity_bytes // SEQUENCES_TO_HOLD,
        ),
    )


def load_backend(config: Config, progress: Progress, *, stays: bool = False) -> Backend:
    if config.model.backend == "fake":
        from pippin.backends.fake import FakeBackend

        max_len = config.model.max_len or FAKE_MAX_LEN
        return FakeBackend(num_slots=config.engine.max_running, max_len=max_len)
    from pippin.backends.mlx.backend import MLXBackend

    return MLXBackend.load(
        Path(config.model.model),
        num_slots=config.engine.max_running,
        dtype=config.model.dtype,
        max_len=config.model.max_len,
        deterministic=config.engine.deterministic,
        builds_kernels=stays,
        progress=progress,
    )


def _capacity_bytes(config: Config, backend: Backend) -> int:
    """The byte budget less what the loaded weights already hold."""
    if config.model.backend == "fake":
        return budget_bytes(config.engine, total_bytes=1 << 30, default_share=1.0)
    from pippin.backends.mlx.device import device_info, limit_memory

    device = device_info()
    budget = budget_bytes(config.engine, device.memory_bytes, device.share)
    used = backend.memory_used()
    capacity = int((budget - used) * (1.0 - TRANSIENT_SHARE))
    if capacity < MIN_CAPACITY_BYTES:
        raise LoadError(
            f"memory: the weights hold {used:,} bytes of a budget of {budget:,}, "
            f"which leaves less than {MIN_CAPACITY_BYTES:,} to work with"
        )
    limit_memory(budget)
    return capacity


def budget_bytes(config: EngineConfig, total_bytes: int, default_share: float) -> int:
    amount = default_share if config.memory == "auto" else parse_memory(config.memory)
    return int(amount * total_bytes) if isinstance(amount, float) else amount
