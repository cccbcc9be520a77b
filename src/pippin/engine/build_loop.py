"""Puts a backend, a prefix cache and a scheduler together. Knows no processes and no text."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pippin.amounts import option_bytes, parse_memory, show_bytes, split_amount
from pippin.backends.base import Backend, DeviceInfo
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import Canary
from pippin.config import Config, EngineConfig
from pippin.decode.compiler import GrammarCompiler
from pippin.decode.proving.prover import Prover
from pippin.engine.build_peers import PeerBuilder
from pippin.engine.build_tiers import (
    BATCHES_IN_FLIGHT,
    build_tiers,
    tier_batch_bytes,
    tier_kinds,
)
from pippin.engine.model_vocabulary import load_vocabulary
from pippin.engine.running_rows import RunningRows, rows_that_fit, rows_to_load
from pippin.errors import ConfigError, LoadError
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.scheduler_limits import Limits
from pippin.scheduler.speculation.depth import DepthPolicy
from pippin.scheduler.speculation.drafter import DeviceDrafter
from pippin.scheduler.speculation.speculation import Speculation
from pippin.scheduler.speculation.suffix import SuffixDrafter
from pippin.types import ModelSpec

SEQUENCES_TO_HOLD = 4  # the states of one long prompt may not fill the tree alone
FAKE_MAX_LEN = 8192
MAX_DEPTH = 6  # drafts of a row: each takes memory
LEAST_TOKENS = 256  # a budget that holds no request of this many is an error at start

Progress = Callable[[str], None]  # called with the name of each stage of a load


def build_loop(
    config: Config,
    progress: Progress,
    *,
    stays: bool = False,
    for_streams: bool = True,
    backend: Backend | None = None,
) -> Loop:
    """Load the model and put a scheduler on it, for an engine process (`stays`) or for `LLM`.

    `for_streams`: replies are read as they come. A `backend` that is given has been loaded already.
    """
    prover = Prover((sys.executable, "-m", "pippin.engine.grammar_zygote"))
    if stays and config.model.backend != "fake":
        prover.start()  # it is ready by the time the model is
    is_given = backend is not None
    backend = backend or load_backend(config, progress)
    if stays:
        gc.freeze()  # what a load leaves is no garbage, and no collection need look at it
    try:
        capacity_bytes = _capacity_bytes(config.engine, backend)
    except LoadError:
        if not is_given:  # a caller may try again in this process, with other options
            backend.close()
        raise
    kinds = tier_kinds(config, backend.device)
    batch_bytes = tier_batch_bytes(backend, capacity_bytes)
    peers = config.peers
    num_tiers = len(kinds) + peers.asks + peers.listens
    capacity_bytes -= num_tiers * BATCHES_IN_FLIGHT * batch_bytes
    loaded = rows_on(config.engine, backend.device)
    rows = rows_that_fit(config.engine, loaded, capacity_bytes, backend.row_bytes)
    limits = Limits(
        max_running=rows.number,
        max_running_reason=rows.reason,
        max_queue=config.engine.max_queue,
        max_queue_tokens=config.engine.max_queue_tokens,
        prefill_tokens=config.engine.prefill_tokens or backend.device.prefill_tokens,
        max_gap=config.engine.max_gap,
        for_streams=for_streams,
        deterministic=config.engine.deterministic,
        forced_chunks=config.engine.forced_chunks,
        capacity_bytes=capacity_bytes,
    )
    cache = _build_cache(config.engine, backend.spec, capacity_bytes)
    model_dir, vocab_size = Path(config.model.model), backend.spec.vocab_size
    prover.set_up(model_dir=str(model_dir), vocab_size=vocab_size)
    compiler = GrammarCompiler(lambda: load_vocabulary(model_dir, vocab_size), prover)
    tiers, pushes = [], None
    if cache is not None:
        tiers = build_tiers(kinds, config, backend, cache, batch_bytes, progress)
        builder = PeerBuilder(config, backend, cache, batch_bytes)
        if peers.asks:
            tiers.append(builder.tier(len(tiers)))
        if peers.listens:
            pushes = builder.pushes()
    elif peers.role != "alone":
        raise ConfigError(
            f"role is {peers.role}, which requires the prefix cache: remove --no-prefix-cache"
        )
    speculation = _build_speculation(config.engine, backend, cache)
    scheduler = Scheduler(
        backend,
        limits,
        cache,
        compiler=compiler,
        tiers=tiers,
        speculation=speculation,
        pushes=pushes,
    )
    return Loop(scheduler, backend, overlap=config.engine.overlap)


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


def _build_speculation(
    config: EngineConfig, backend: Backend, cache: PrefixCache | None
) -> Speculation | None:
    """None also where this backend verifies no drafts for this model, and has logged why."""
    depth = min(_max_depth(config), backend.max_depth)
    num_own = 0 if config.speculate == "suffix" else min(depth, backend.drafts_itself)
    if config.speculate in ("mtp", "draft") and not num_own:
        why = (
            "the checkpoint has no MTP head that this backend can run"
            if depth
            else "this backend verifies no drafts for this model"
        )
        kind = config.speculate
        raise LoadError(f"speculate is {kind}, and {why}: use --speculate suffix, auto or off")
    if not depth:
        return None
    return Speculation(
        None if config.speculate in ("mtp", "draft") else SuffixDrafter(cache),
        depth,
        lambda running: depth,
        DepthPolicy(),
        DeviceDrafter("mtp" if config.draft_model is None else "draft", num_own)
        if num_own
        else None,
    )


def _max_depth(config: EngineConfig) -> int:
    return 0 if config.speculate in (None, "off") else MAX_DEPTH


def rows_on(config: EngineConfig, device: DeviceInfo) -> RunningRows:
    """As many as a backend is loaded with."""
    budget = budget_bytes(config, device.memory_bytes, device.share)
    return rows_to_load(config, device.kind, budget)


def load_backend(config: Config, progress: Progress) -> Backend:
    draft = None if config.engine.draft_model is None else Path(config.engine.draft_model)
    if draft is not None and config.model.backend == "fake":
        raise LoadError(
            "draft_model is an option of mlx and torch, and this is fake: use another --backend, "
            "or remove --draft-model"
        )
    if config.model.backend == "fake":
        from pippin.backends.fake import FakeBackend, fake_device

        max_len = config.model.max_len or FAKE_MAX_LEN
        return FakeBackend(
            num_slots=rows_on(config.engine, fake_device()).number,
            max_len=max_len,
            max_depth=_max_depth(config.engine),
            step_seconds=config.model.fake_step,
        )
    options: dict[str, Any] = {
        "dtype": config.model.dtype,
        "max_len": config.model.max_len,
        "deterministic": config.engine.deterministic,
        "safe": config.engine.safe,
        "fingerprints": keeps_fingerprints(config.engine),
        "max_depth": _max_depth(config.engine),
        "mtp": draft is None and config.engine.speculate in ("auto", "mtp"),
        "progress": progress,
    }
    if config.model.backend == "torch":
        return _load_torch(config, options, draft)
    from pippin.backends.mlx import environment

    environment.prepare(
        deterministic=config.engine.deterministic, buffer_limit=config.engine.buffer_limit
    )

    from pippin.backends.mlx.backend import MLXBackend  # imports mlx, which reads what was set
    from pippin.backends.mlx.device import device_info

    return MLXBackend.load(
        Path(config.model.model),
        num_slots=rows_on(config.engine, device_info()).number,
        wired=config.engine.wired,
        draft=draft,
        **options,
    )


def _load_torch(config: Config, options: dict[str, Any], draft: Path | None) -> Backend:
    try:
        from pippin.backends.torch.backend import TorchBackend
        from pippin.backends.torch.device import device_info, find_device
    except ImportError as error:
        raise LoadError(f"torch is not installed: pip install 'pippin[torch]' ({error})") from error
    if config.engine.wired or config.engine.buffer_limit is not None:
        raise LoadError("wired and buffer_limit are options of mlx, and this is torch")
    return TorchBackend.load(
        Path(config.model.model),
        num_slots=rows_on(config.engine, device_info(find_device())).number,
        prefill_tokens=config.engine.prefill_tokens,
        draft=draft,
        **options,
    )


def keeps_fingerprints(config: EngineConfig) -> bool:
    return config.prefix_cache and config.canary != "off"


def _capacity_bytes(config: EngineConfig, backend: Backend) -> int:
    """What the byte budget leaves for requests and the tree."""
    device = backend.device
    budget = budget_bytes(config, device.memory_bytes, device.share)
    capacity = backend.limit_memory(budget)
    least = backend.row_bytes(LEAST_TOKENS)
    num_parts = split_amount(config.memory)[1]
    if capacity < least:
        used = max(budget - capacity, backend.memory_used())
        raise LoadError(
            f"memory: the model uses {show_bytes(backend.memory_used())} of a budget of "
            f"{show_bytes(budget)}, which leaves {show_bytes(max(capacity, 0))}{_beside(backend)}; "
            f"one request of {LEAST_TOKENS:,} tokens needs {show_bytes(least)}: "
            f"{_remedy(int(1.1 * (used + 2 * least)), device.memory_bytes, num_parts)}"
        )
    return capacity


def _remedy(needed: int, total_bytes: int, num_parts: int) -> str:
    """`needed`: a budget that leaves room for a few requests, with a margin; for each of those
    that share the device."""
    if num_parts > 1:
        return (
            f"{num_parts} engines share the device, which has {show_bytes(total_bytes)}, and each "
            f"needs {show_bytes(needed)}: start with --memory {option_bytes(num_parts * needed)} "
            f"or more for all of them, use at most {max(total_bytes // needed, 1)} (--replicas), "
            "or a smaller or quantized model"
        )
    if needed <= total_bytes:
        return (
            f"start with --memory {option_bytes(needed)} or more (the device has "
            f"{show_bytes(total_bytes)}), or use a smaller or quantized model"
        )
    return (
        f"about {show_bytes(needed)} are needed and the device has {show_bytes(total_bytes)}: "
        "use a smaller or quantized model"
    )


def _beside(backend: Backend) -> str:
    """What else takes of the budget, where a backend knows."""
    others = {name: n for name, n in backend.memory_parts().items() if name != "pools" and n}
    parts = ", ".join(f"{name} {show_bytes(n)}" for name, n in others.items())
    return f" ({parts})" if parts else ""


def budget_bytes(config: EngineConfig, total_bytes: int, default_share: float) -> int:
    given, num_parts = split_amount(config.memory)
    amount = default_share if given == "auto" else parse_memory(given)
    whole = int(amount * total_bytes) if isinstance(amount, float) else amount
    return whole // num_parts
