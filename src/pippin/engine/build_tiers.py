"""Puts tiers together: a store in the host's memory or in a directory, a tree, threads in between.

Knows what makes two runs of a model alike; knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pippin.amounts import option_bytes, parse_bytes, show_bytes
from pippin.backends.base import Backend, DeviceInfo
from pippin.backends.host import host_memory_bytes
from pippin.cache.disk.disk_store import DiskStore, open_store
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.cache.entries.entry_store import EntryStore
from pippin.cache.host.host_store import HostStore
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.kinds import DISK, HOST, TierKind
from pippin.cache.tiers.tier_io import TierIO
from pippin.cache.tree.canary import Canary
from pippin.config import Config
from pippin.engine.exit_times import STOP_GRACE_SECONDS
from pippin.errors import ConfigError, LoadError
from pippin.types import GRID, Component
from pippin.version import __version__

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
    """What is in the directory is in the tree on disk when this returns.

    Raises DiskCacheError if the directory cannot be used, and LoadError if there is not enough
    memory.
    """
    found: list[tuple[CacheTier, TierIO]] = []
    engine = config.engine
    for level, kind in enumerate(kinds):
        if kind is HOST:
            progress("pinning memory")
            store: EntryStore = _open_host(config, backend, batch_bytes)
        else:
            progress("the cache on disk")
            store = _open_disk(config, backend)
        canary = Canary("log" if engine.canary == "off" else engine.canary)
        canary.self_test()
        tiers = CacheTier(
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
        tier_io = TierIO(store, allocate=backend.host_memory, piece_bytes=batch_bytes)
        found.append((tiers, tier_io))
    return found


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
