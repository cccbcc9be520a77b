"""Serves the small checkpoints of torch_families.py, and the bundled model, on torch."""

from __future__ import annotations

from functools import cache

import numpy as np

from builders import AMPLE_BYTES, Client, FixedPace
from bundled import BUNDLED_PATH
from pippin.backends.torch.backend import TorchBackend
from pippin.backends.torch.load import LoadedModel, load
from pippin.cache.canary import Canary
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Limits, Scheduler
from reference import BUNDLED
from torch_families import checkpoint

NUM_SLOTS = 16


@cache
def load_torch(name: str) -> LoadedModel:
    """In float32 on every device: half precision would leave too many tokens on a level."""
    return load(BUNDLED_PATH if name == BUNDLED else checkpoint(name), dtype="float32")


def make_torch_backend(name: str, *, num_slots: int, deterministic: bool = False) -> TorchBackend:
    loaded = load_torch(name)
    return TorchBackend(loaded, num_slots=num_slots, deterministic=deterministic, debug=True)


def make_torch_client(
    name: str,
    *,
    cache: bool = True,
    cache_bytes: int = AMPLE_BYTES,
    capacity_bytes: int = AMPLE_BYTES,
    chunk: int = 128,
    num_slots: int = NUM_SLOTS,
    overlap: bool = True,
    canary: Canary | None = None,
) -> Client:
    backend = make_torch_backend(name, num_slots=num_slots)
    spec = backend.spec
    prefix_cache = PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=min(cache_bytes, capacity_bytes),
        canary=canary,
        policy=CheckpointPolicy(spec.state_bytes, spec.kv_bytes_per_token),
    )
    limits = Limits(max_running=num_slots, prefill_tokens=chunk, capacity_bytes=capacity_bytes)
    scheduler = Scheduler(backend, limits, prefix_cache if cache else None)
    scheduler.pace = FixedPace(chunk)
    return Client(Loop(scheduler, backend, overlap=overlap))


def random_prompt(name: str, num_tokens: int, seed: int) -> list[int]:
    vocab_size = load_torch(name).decoder.shape.vocab_size
    rng = np.random.default_rng([seed, num_tokens])
    tokens: list[int] = rng.integers(2, vocab_size, num_tokens).tolist()
    return tokens
