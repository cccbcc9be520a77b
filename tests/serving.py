"""Serves small real models with a prefix cache, cold and warm, and counts what they compute.

Prompts are random tokens; replies are greedy. A cold reply comes from an engine without a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from builders import AMPLE_BYTES, Client, FixedPace, Reply, make_tiers
from bundled import load_bundled
from families import FAMILIES, build
from integrity import check_integrity
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.prefill import prompts
from pippin.backends.mlx.prefill.batch import ChunkBatch
from pippin.cache.entries import EntryStore
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.radix import Node, as_tokens
from pippin.engine.build_loop import tier_batch_bytes
from pippin.scheduler.loop import Loop
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.speculation import Speculation
from pippin.types import Component, ModelSpec
from processes import is_installed
from reference import BUNDLED

TORCH = "torch "  # the name of a checkpoint that the other backend serves begins so
DRAFTED_BY = " drafted by "  # and the name of a draft model
TORCH_MODELS = tuple(f"{TORCH}{name}" for name in ("qwen3_5", "llama", "llama_windows"))
if not is_installed("torch"):
    TORCH_MODELS = ()
# States and attention in turn, attention alone, windows, states alone, both in each layer.
ONE_OF_EACH_KIND = ("qwen3_5", "llama", "gpt_oss", "mamba2", "falcon_h1")
ON_EITHER_BACKEND = (*FAMILIES, *TORCH_MODELS)
TRIED_MOST = (*ONE_OF_EACH_KIND, *TORCH_MODELS)
# A qwen3_5 of larger sizes: it shows no more than the small one, and takes ten times as long.
BUNDLED_ON_EITHER = (BUNDLED, *(f"{TORCH}{BUNDLED}" for _ in TORCH_MODELS[:1]))
NUM_SLOTS = 16


def served(name: str) -> LoadedModel:
    return load_bundled() if name == BUNDLED else _prepared(name, operations() is not None)


@functools.cache
def _prepared(name: str, with_operations: bool) -> LoadedModel:
    """One that was prepared without operations stays without."""
    return prepare(*build(name))


def make_backend(
    name: str,
    num_slots: int,
    model: LoadedModel | None = None,
    pool_bytes: int = AMPLE_BYTES,
    max_depth: int = 0,
) -> Any:
    if name.startswith(TORCH):
        from torch_serving import make_torch_backend

        checkpoint, _, draft = name.removeprefix(TORCH).partition(DRAFTED_BY)
        return make_torch_backend(
            checkpoint,
            num_slots=num_slots,
            pool_bytes=pool_bytes,
            max_depth=max_depth,
            mtp=name.endswith("_mtp"),
            draft=draft or None,
        )
    own, _, draft = name.partition(DRAFTED_BY)
    loaded = model or served(own)
    if draft:
        loaded = replace(loaded, draft=served(draft))
    return MLXBackend(loaded, num_slots=num_slots, max_depth=max_depth, debug=True)


@functools.cache
def spec_of(name: str) -> ModelSpec:
    spec: ModelSpec = make_backend(name, num_slots=1, pool_bytes=AMPLE_BYTES >> 4).spec
    return spec


def make_client(
    name: str,
    *,
    cache: bool = True,
    cache_bytes: int = AMPLE_BYTES,
    capacity_bytes: int = AMPLE_BYTES,
    chunk: int = 128,
    num_slots: int = NUM_SLOTS,
    overlap: bool = True,
    canary: Canary | None = None,
    model: LoadedModel | None = None,
    store: EntryStore | None = None,
    host: EntryStore | None = None,
    speculation: Speculation | None = None,
) -> Client:
    """`store`: with a tier on disk, `host`: in the host's memory, from which a load is always worth
    its while."""
    max_depth = 0 if speculation is None else speculation.max_depth
    backend = make_backend(name, num_slots, model, capacity_bytes, max_depth)
    spec = backend.spec
    prefix_cache = PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=min(cache_bytes, capacity_bytes),
        canary=canary,
        policy=CheckpointPolicy(spec.state_bytes, spec.kv_bytes_per_token),
    )
    limits = Limits(max_running=num_slots, prefill_tokens=chunk, capacity_bytes=capacity_bytes)
    batch_bytes = tier_batch_bytes(backend, capacity_bytes=0)
    tiers = make_tiers(backend, prefix_cache, host=host, disk=store, batch_bytes=batch_bytes)
    tree = prefix_cache if cache else None
    scheduler = Scheduler(backend, limits, tree, tiers=tiers, speculation=speculation)
    scheduler.pace = FixedPace(chunk, costs=scheduler.pace.costs)
    if tiers:
        scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
    return Client(Loop(scheduler, backend, overlap=overlap))


def cache_of(client: Client) -> PrefixCache:
    cache = client.loop.scheduler.cache
    assert cache is not None
    return cache


def make_prompt(name: str, num_tokens: int, seed: int) -> list[int]:
    rng = np.random.default_rng([seed, num_tokens])
    tokens: list[int] = rng.integers(2, spec_of(name).vocab_size, num_tokens).tolist()
    return tokens


def diverge(name: str, prompt: Sequence[int], at: int, num_tokens: int, seed: int) -> list[int]:
    """The first `at` tokens of `prompt`, then others; the first of these certainly differs."""
    tail = make_prompt(name, num_tokens, seed)
    if at < len(prompt) and tail[0] == prompt[at]:
        tail[0] = 3 if prompt[at] != 3 else 4
    return [*prompt[:at], *tail]


def cold(name: str, prompts: Sequence[Sequence[int]], *, max_tokens: int = 4) -> list[Reply]:
    """What the model says without any cache. Asked once, whoever wants to know it again."""
    return list(_cold(name, tuple(map(tuple, prompts)), max_tokens))


@functools.lru_cache(maxsize=32)
def _cold(name: str, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> list[Reply]:
    return ask_all(make_client(name, cache=False, chunk=1024), prompts, max_tokens=max_tokens)


def ask_all(client: Client, prompts: Sequence[Sequence[int]], **params: Any) -> list[Reply]:
    """All at once, each scored."""
    replies = [client.submit(p, logprobs=2, **params) for p in prompts]
    client.run()
    return replies


def most_recomputed(name: str) -> int:
    """Tokens of a shared prefix that may be computed again."""
    return 127 if Component.STATE in spec_of(name).components else 1


def check_idle(client: Client) -> None:
    """Everything was given back: slots, reservations, locks, rows; the tree adds up."""
    scheduler, backend = client.loop.scheduler, client.loop.backend
    assert client.loop.idle
    assert scheduler.slots.num_free == scheduler.slots.num_slots
    assert scheduler.budget.claimed == 0
    cache = cache_of(client)
    if isinstance(backend, MLXBackend):
        assert not backend._prompts
        assert not backend._decodes.rows
    else:
        check_pools(backend, cache)
    assert not cache._locks
    assert cache.nbytes <= cache.capacity_bytes
    check_integrity(cache)
    assert all(reply.finish == "length" for reply in client.replies.values())


def check_pools(backend: Any, cache: PrefixCache) -> None:
    """Of torch's pools nobody but the tree holds anything."""
    arena = backend.runner.pools.arena
    arena.check_integrity()
    assert arena.used_bytes == cache.nbytes - cache.component_bytes[Component.HIDDEN]
    assert not backend.runner.rows.lengths.any()


def active_bytes() -> int:
    """What mlx holds once it has nothing left to do."""
    mx.synchronize()
    return int(mx.get_active_memory())


def nodes_of(client: Client, tokens: Sequence[int]) -> list[Node]:
    """The tree's nodes along a sequence, from the root down."""
    return cache_of(client).radix.walk(as_tokens(tokens))[0]


@dataclass
class Counted:
    """Prompt tokens that went into forwards; padding is not counted."""

    lens: list[int] = field(default_factory=list)

    def take(self) -> int:
        total, self.lens = sum(self.lens), []
        return total


@contextmanager
def counted_prompts() -> Iterator[Counted]:
    counted = Counted()

    class CountedBatch(ChunkBatch):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            counted.lens.append(int(self.lens.sum()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "ChunkBatch", CountedBatch)
        if TORCH_MODELS:
            from pippin.backends.torch import forwards as torch_forwards

            def take_chunks(rows: Sequence[Any], *args: Any) -> Any:
                counted.lens.append(sum(len(row.tokens) for row in rows))
                return make(rows, *args)

            make = torch_forwards.take_chunks
            patch.setattr(torch_forwards, "take_chunks", take_chunks)
        yield counted
