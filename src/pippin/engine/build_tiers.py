"""Puts the tier on disk together: a store in a directory, a second tree, threads in between.

Knows what makes two runs of a model alike; knows no files.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pippin import __version__
from pippin.amounts import parse_bytes
from pippin.backends.base import Backend
from pippin.cache.canary import Canary
from pippin.cache.disk.disk_store import open_store
from pippin.cache.disk.fingerprint import model_fingerprint
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.courier import Courier
from pippin.cache.tiers.tiers import Tiers
from pippin.config import Config
from pippin.types import GRID, Component

MOST_BATCH_BYTES = 32 << 20  # a step copies so much, and streams wait for it
BATCH_SHARE = 1 / 64  # of the budget
PATIENCE_S = 5.0  # with an engine that has yet to notice that its server was killed
BATCHES_IN_FLIGHT = 2  # one that is written, one that is loaded: beside rows and tree


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


def build_tiers(
    config: Config, backend: Backend, cache: PrefixCache, batch_bytes: int
) -> tuple[Tiers, Courier]:
    """What is in the directory is in the tree on disk when this returns.

    Raises DiskCacheError if the directory cannot be used.
    """
    engine = config.engine
    assert engine.cache_dir is not None
    assert engine.disk is not None
    store = open_store(
        Path(engine.cache_dir).expanduser(),
        fingerprint(config, backend),
        parse_bytes("disk", engine.disk),
        patience_s=PATIENCE_S,
    )
    canary = Canary("log" if engine.canary == "off" else engine.canary)
    canary.self_test()
    tiers = Tiers(
        cache,
        store,
        backend.spec,
        backend.payload_arrays,
        canary=canary,
        batch_bytes=batch_bytes,
        on_grid=engine.deterministic,
    )
    return tiers, Courier(store, allocate=backend.host_memory, piece_bytes=batch_bytes)


def fingerprint(config: Config, backend: Backend) -> bytes:
    """Of the weights and of what is computed from them.

    Backends that lay their payloads out alike share entries. Deterministic runs share them with
    nobody but themselves: another backend, or another version of it, rounds differently.
    """
    kept = [component for component in Component if component in backend.spec.components]
    facts = {c.value: repr(backend.payload_arrays(c, 1)) for c in kept}
    if config.engine.deterministic:
        facts["deterministic"] = f"{config.model.backend} {backend.device.kind} {__version__}"
    if config.model.backend == "fake":
        return hashlib.blake2b(repr(sorted(facts.items())).encode(), digest_size=32).digest()
    return model_fingerprint(Path(config.model.model), facts)
