"""Puts a backend, a prefix cache and a scheduler together."""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pippin.amounts import budget_of, option_bytes, parse_bytes, show_bytes, split_amount
from pippin.backends.base import Backend, DeviceInfo
from pippin.backends.host import host_memory_bytes
from pippin.cache.disk.disk_store import DiskStore, open_store
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.cache.entries import EntryStore
from pippin.cache.host_store import HostStore
from pippin.cache.peer_store import PeerStore
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import DISK, HOST, PEER, CacheTier, TierKind
from pippin.cache.tiers.tier_io import TierIO, plain_memory
from pippin.cache.tree.canary import Canary
from pippin.config import Config, EngineConfig
from pippin.decode.compile import GrammarCompiler
from pippin.decode.prover import Prover
from pippin.engine.engine_spec import STOP_GRACE_SECONDS
from pippin.engine.grammar_zygote import load_vocabulary
from pippin.engine.peers.connection import facts_fingerprint, peer_facts, read_keys
from pippin.engine.peers.peer_links import PeerLinks
from pippin.engine.peers.peer_listener import Deliver, PeerListener
from pippin.errors import ConfigError, LoadError
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.speculation import DepthPolicy, DeviceDrafter, Speculation
from pippin.scheduler.spills import Pushes
from pippin.scheduler.suffix import SuffixDrafter
from pippin.types import GRID, Component, ModelSpec
from pippin.version import __version__

# Steps of more rows generate more tokens in all up to about these.
MOST_ON_CUDA, MOST_ELSEWHERE = 256, 64
MOST_WITH_DRAFT_MODEL = 32  # each row has keys of that model too, and drafts pay where rows are few
LEAST = 8
MULTIPLE = 8
BUDGET_BYTES_PER_ROW = 64 << 20
TYPICAL_TOKENS = 1024  # of a request: longer ones are preempted where too many are


@dataclass(frozen=True)
class RunningRows:
    number: int
    reason: str


def rows_to_load(config: EngineConfig, kind: str, budget_bytes: int) -> RunningRows:
    """What a backend on a device of this kind has room for in its buffers."""
    if config.max_running != "auto":
        return RunningRows(config.max_running, "--max-running")
    if config.draft_model is not None:
        return RunningRows(MOST_WITH_DRAFT_MODEL, "auto: the most with a draft model")
    if kind != "cuda":
        return RunningRows(MOST_ELSEWHERE, f"auto: the most for {kind}")
    within = _rounded(budget_bytes // BUDGET_BYTES_PER_ROW)
    if within >= MOST_ON_CUDA:
        return RunningRows(MOST_ON_CUDA, "auto: the most for cuda")
    per_row = show_bytes(BUDGET_BYTES_PER_ROW)
    return RunningRows(within, f"auto: {per_row} a row of a budget of {show_bytes(budget_bytes)}")


def rows_that_fit(
    config: EngineConfig, loaded: RunningRows, capacity_bytes: int, row_bytes: Callable[[int], int]
) -> RunningRows:
    """`capacity_bytes`: for requests; `row_bytes`: of one with so many tokens."""
    fit = _rounded(capacity_bytes // max(1, row_bytes(TYPICAL_TOKENS)))
    if config.max_running != "auto" or fit >= loaded.number:
        return loaded
    return RunningRows(
        fit,
        f"auto: {show_bytes(capacity_bytes)} for requests hold {fit} of {TYPICAL_TOKENS:,} tokens",
    )


def _rounded(rows: int) -> int:
    return max(LEAST, rows // MULTIPLE * MULTIPLE)


def listen(config: Config, loop: Loop, deliver: Deliver) -> PeerListener | None:
    """Accept decode engines from now on; None if this engine has no pushes."""
    pushes = loop.scheduler.pushes
    if pushes is None:
        return None
    (address,) = config.peers.listen_addresses
    facts = peer_facts(config, loop.backend)
    return PeerListener(address, read_keys(config.peers), facts, loop.backend.spec, pushes, deliver)


MOST_BATCH_BYTES = 32 << 20  # a step copies so much, and streams wait for it
BATCH_SHARE = 1 / 64  # of the budget
BATCHES_IN_FLIGHT = 2  # of each tier, one written and one loaded: beside rows and tree


def tier_batch_bytes(backend: Backend, capacity_bytes: int) -> int:
    """Of one write, and of one piece that is loaded: what is on its way at a time."""
    spec = backend.spec
    least = max(
        spec.state_bytes,
        GRID * spec.kv_bytes_per_token,
        spec.window * spec.window_bytes_per_token,
        spec.hidden_bytes,
    )
    return max(least, min(MOST_BATCH_BYTES, int(capacity_bytes * BATCH_SHARE)))


def tier_kinds(config: Config, device: DeviceInfo) -> list[TierKind]:
    """Below memory, the fastest first. Raises ConfigError for one that this device cannot have."""
    kinds: list[TierKind] = []
    if config.engine.host_cache is not None:
        _check_host_cache(config, device)
        kinds.append(HOST)
    if config.engine.cache_dir is not None:
        kinds.append(DISK)
    if config.peers.asks:
        kinds.append(PEER)
    return kinds


def _check_host_cache(config: Config, device: DeviceInfo) -> None:
    if device.unified:
        raise ConfigError(
            f"host_cache requires a GPU with its own memory; {device.name} uses the host's memory: "
            "remove --host-cache, and raise --memory if there is more"
        )
    if config.model.backend == "mlx":
        raise ConfigError(
            "host_cache requires pinned memory, which mlx does not have: use --backend torch, or "
            "remove --host-cache"
        )
    wanted = _host_bytes(config)
    if wanted > (there := host_memory_bytes()):
        raise ConfigError(
            f"host_cache is {show_bytes(wanted)}, and this machine has {show_bytes(there)} of "
            f"memory: use --host-cache {option_bytes(there // 2)}, for example"
        )


def build_tiers(
    kinds: Sequence[TierKind],
    config: Config,
    backend: Backend,
    cache: PrefixCache,
    batch_bytes: int,
    progress: Callable[[str], None],
) -> list[tuple[CacheTier, TierIO]]:
    """What is in the directory is in the tree on disk when this returns, and prefill engines are
    being connected to.

    Raises DiskCacheError if the directory cannot be used, and LoadError if there is not enough
    memory.
    """
    found: list[tuple[CacheTier, TierIO]] = []
    engine = config.engine
    for level, kind in enumerate(kinds):
        if kind is HOST:
            progress("pinning memory")
            store: EntryStore[Any] = _open_host(config, backend, batch_bytes)
        elif kind is PEER:
            store = _open_peers(config, backend, batch_bytes)
        else:
            progress("the cache on disk")
            store = _open_disk(config, backend)
        canary = Canary("log" if engine.canary == "off" else engine.canary)
        tier = CacheTier(
            cache,
            store,
            backend.spec,
            backend.payload_arrays,
            canary=canary,
            batch_bytes=batch_bytes,
            kind=kind,
            level=level,
            on_grid=engine.deterministic,
        )
        piece_bytes = 0 if kind is PEER else batch_bytes
        tier_io = TierIO(store, allocate=backend.host_memory, piece_bytes=piece_bytes)
        found.append((tier, tier_io))
    return found


def _open_peers(config: Config, backend: Backend, batch_bytes: int) -> PeerStore:
    peers, facts = config.peers, peer_facts(config, backend)
    links = PeerLinks(peers.addresses, read_keys(peers), facts, backend.payload_arrays, batch_bytes)
    try:
        store = PeerStore(
            parse_bytes("peer_memory", peers.peer_memory),
            plain_memory,
            batch_bytes,
            facts_fingerprint(facts),
            links,
        )
    except ValueError as error:
        links.close()
        raise ConfigError(f"peer_memory: {error}") from error
    links.start(store)
    return store


def _open_host(config: Config, backend: Backend, batch_bytes: int) -> HostStore:
    max_bytes = _host_bytes(config)
    try:
        return HostStore(max_bytes, backend.host_memory, batch_bytes)
    except ValueError as error:
        raise ConfigError(f"host_cache: {error}") from error
    except (MemoryError, RuntimeError) as error:  # as numpy and torch say it
        raise LoadError(
            f"host_cache: {show_bytes(max_bytes)} of pinned memory could not be allocated "
            f"({error}): use less, such as --host-cache {option_bytes(max_bytes // 2)}"
        ) from error


def _open_disk(config: Config, backend: Backend) -> DiskStore:
    engine = config.engine
    assert engine.cache_dir is not None
    assert engine.disk is not None
    return open_store(
        Path(engine.cache_dir).expanduser(),
        fingerprint(config, backend),
        parse_bytes("disk", engine.disk),
        patience_s=STOP_GRACE_SECONDS,  # an engine whose server was killed may still be writing
    )


def _host_bytes(config: Config) -> int:
    assert config.engine.host_cache is not None
    return parse_bytes("host_cache", config.engine.host_cache)


def fingerprint(config: Config, backend: Backend) -> bytes:
    """Of the weights and of what is computed from them.

    Entries are read by the backend that wrote them alone, with the same libraries: what an error
    that was fixed in either has computed must not be read again. Deterministic runs share entries
    with no other device or version either, which may round differently. With --safe nothing is read
    that an operation or a kernel of ours may have written.
    """
    kept = [component for component in Component if component in backend.spec.components]
    facts = {c.value: repr(backend.payload_arrays(c, 1)) for c in kept}
    facts["arithmetic"] = backend.arithmetic
    if config.engine.deterministic:
        facts["deterministic"] = f"{backend.device.kind} {__version__}"
    if config.engine.safe:
        facts["safe"] = "plain operations"
    if config.model.backend == "fake":
        return hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=32).digest()
    return model_fingerprint(Path(config.model.model), facts)


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
    num_tiers = len(kinds) + peers.listens
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
        if peers.listens:
            pushes = Pushes(
                cache,
                backend,
                backend.payload_arrays,
                fingerprint=facts_fingerprint(peer_facts(config, backend)),
                batch_bytes=batch_bytes,
            )
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
    return PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=capacity_bytes,
        canary=Canary(config.canary),
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
    budget = budget_of(config.memory, device.memory_bytes, device.share)
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
        "fingerprints": config.engine.prefix_cache and config.engine.canary != "off",
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


def _capacity_bytes(config: EngineConfig, backend: Backend) -> int:
    """What the byte budget leaves for requests and the tree."""
    device = backend.device
    budget = budget_of(config.memory, device.memory_bytes, device.share)
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
