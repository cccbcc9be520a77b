"""Serves small real models with a prefix cache, cold and warm, and counts what they compute.

Prompts are random tokens; replies are greedy. A cold reply comes from an engine without a cache,
and must be clear: its best tokens are ahead of the second best by more than rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import pippin
from builders import AMPLE_BYTES, Client, FixedPace, Reply
from families import FAMILIES, build
from pippin.backends.mlx import backend as backend_module
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.load import LoadedModel, load, prepare
from pippin.backends.mlx.prefill.batch import ChunkBatch
from pippin.cache.canary import Canary
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.radix import Node, as_tokens
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Limits, Scheduler
from pippin.types import Component

BUNDLED = "bundled"
MODELS = (BUNDLED, *FAMILIES)
CLEAR = 1e-4  # a greedy choice ahead by this much cannot fall to rounding
TOLERANCE = 1e-4  # of log probabilities, between two orders of the same float32 sums
NUM_SLOTS = 16


@functools.cache
def served(name: str) -> LoadedModel:
    """Built without `mx.compile`, which calls a C++ compiler on a Linux CPU."""
    mx.disable_compile()
    if name == BUNDLED:
        return load(Path(pippin.__file__).parent / "models" / "stories-hybrid-20m")
    return prepare(*build(name))


def make_client(
    name: str,
    *,
    cache: bool = True,
    cache_bytes: int = AMPLE_BYTES,
    capacity_bytes: int = AMPLE_BYTES,
    chunk: int = 128,
    overlap: bool = True,
    canary: Canary | None = None,
    model: LoadedModel | None = None,
) -> Client:
    backend = MLXBackend(model or served(name), num_slots=NUM_SLOTS, debug=True)
    spec = backend.spec
    prefix_cache = PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=min(cache_bytes, capacity_bytes),
        canary=canary,
        policy=CheckpointPolicy(spec.state_bytes, spec.kv_bytes_per_token),
    )
    limits = Limits(max_running=NUM_SLOTS, prefill_tokens=chunk, capacity_bytes=capacity_bytes)
    scheduler = Scheduler(backend, limits, prefix_cache if cache else None)
    scheduler.pace = FixedPace(chunk)
    return Client(Loop(scheduler, backend, overlap=overlap))


def cache_of(client: Client) -> PrefixCache:
    cache = client.loop.scheduler.cache
    assert cache is not None
    return cache


def make_prompt(name: str, num_tokens: int, seed: int) -> list[int]:
    rng = np.random.default_rng([seed, num_tokens])
    tokens: list[int] = rng.integers(2, served(name).vocab_size, num_tokens).tolist()
    return tokens


def diverge(name: str, prompt: Sequence[int], at: int, num_tokens: int, seed: int) -> list[int]:
    """The first `at` tokens of `prompt`, then others; the first of these certainly differs."""
    tail = make_prompt(name, num_tokens, seed)
    if at < len(prompt) and tail[0] == prompt[at]:
        tail[0] = 3 if prompt[at] != 3 else 4
    return [*prompt[:at], *tail]


def cold(name: str, prompts: Sequence[Sequence[int]], *, max_tokens: int = 4) -> list[Reply]:
    """What the model says without any cache; fails if a choice hangs on rounding."""
    client = make_client(name, cache=False, chunk=1024)
    replies = ask_all(client, prompts, max_tokens=max_tokens)
    for reply in replies:
        for scored in reply.logprobs:
            best, second = sorted(scored.top_logprobs)[-1:-3:-1]
            assert best - second > CLEAR, f"{name}: {reply.id} is not clear, choose other seeds"
    return replies


def ask_all(
    client: Client, prompts: Sequence[Sequence[int]], *, max_tokens: int = 4
) -> list[Reply]:
    """All at once, each scored."""
    replies = [client.submit(p, max_tokens=max_tokens, logprobs=2) for p in prompts]
    client.run()
    return replies


def assert_same(warm: Sequence[Reply], expected: Sequence[Reply]) -> None:
    """The same tokens, and the same log probabilities but for the order of float32 sums."""
    assert [reply.tokens for reply in warm] == [reply.tokens for reply in expected]
    for mine, theirs in zip(warm, expected, strict=True):
        a, b = ([scored.logprob for scored in reply.logprobs] for reply in (mine, theirs))
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def bound(name: str) -> int:
    """Tokens of a shared prefix that may be computed again."""
    has_state = any(leaf.component is Component.STATE for leaf in served(name).layout.leaves)
    return 127 if has_state else 1


def check_idle(client: Client) -> None:
    """Everything was given back: slots, reservations, locks, rows; the tree adds up."""
    scheduler, backend = client.loop.scheduler, client.loop.backend
    assert isinstance(backend, MLXBackend)
    assert client.loop.idle
    assert scheduler.slots.num_free == scheduler.slots.num_slots
    assert scheduler.budget.claimed == 0
    assert not backend._prompts
    assert not backend._rows
    cache = cache_of(client)
    assert not cache._locks
    assert cache.nbytes <= cache.capacity_bytes
    cache.check_integrity()
    assert all(reply.finish == "length" for reply in client.replies.values())


def nodes_of(client: Client, tokens: Sequence[int]) -> list[Node]:
    """The tree's nodes along a sequence, from the root down."""
    return cache_of(client)._tree.walk(as_tokens(tokens))[0]


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
        patch.setattr(backend_module, "ChunkBatch", CountedBatch)
        yield counted
