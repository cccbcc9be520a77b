"""Builders for tests of the scheduler and its loop: a loop on the toy model, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

import pippin.cache.tiers.tier_io as tier_io_module
import pippin.scheduler.loop as loop_module
from integrity import check_integrity, check_tier
from pippin.backends.base import Backend
from pippin.backends.fake import MASK, FakeBackend, mix, placed
from pippin.backends.masks import allowed_ids, num_words, pack
from pippin.cache.entries import EntryStore
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import DISK, HOST, CacheTier
from pippin.cache.tiers.tier_io import TierIO
from pippin.cache.tree.canary import Canary
from pippin.decode.compile import Grammar
from pippin.messages import Submit, TokenDelta, pack_tokens
from pippin.scheduler.loop import Loop
from pippin.scheduler.pace import Pace
from pippin.scheduler.request import Limits
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.speculation import Speculation
from pippin.scheduler.suffix import SuffixDrafter
from pippin.types import GRID, Component, FinishReason, SamplingParams, TokenLogprobs

ALL = (Component.ATTENTION, Component.WINDOW, Component.STATE)
AMPLE_BYTES = 1 << 30
MAX_STEPS = 5_000  # a loop that takes longer than this will never end


@dataclass
class FixedPace(Pace):
    """A prompt budget that does not depend on how fast the machine is."""

    def budget(self, num_streams: int, num_prompts: int = 1, num_drafts: int = 0) -> int:
        return self.prefill_tokens

    @property
    def productive_tokens(self) -> int:
        return GRID

    def pays_off(self, lengths: Sequence[int], num_streams: int) -> bool:
        return True


class Clocked(Protocol):
    now: float


@contextmanager
def loop_clock(backend: Clocked) -> Iterator[None]:
    """The loop, and those who read from tiers, read the backend's clock: what they learn of costs
    is the same in every run."""
    real = loop_module.perf_counter
    loop_module.perf_counter = tier_io_module.perf_counter = lambda: backend.now
    try:
        yield
    finally:
        loop_module.perf_counter = tier_io_module.perf_counter = real


def make_scheduler(
    backend: FakeBackend,
    *,
    num_slots: int = 4,
    chunk: int = 128,
    max_queue: int = 1024,
    max_queue_tokens: int = 1 << 30,
    cache: bool = True,
    canary: Canary | None = None,
    deterministic: bool = False,
    forced_chunks: bool = True,
    capacity_bytes: int = AMPLE_BYTES,
    store: EntryStore | None = None,
    host: EntryStore | None = None,
    workers: Executor | None = None,
    batch_bytes: int = 1 << 20,
    speculation: Speculation | None = None,
    suffix_depth: int = 0,
) -> Scheduler:
    """`store`: with a tier on disk; `host`: in the host's memory; `workers`: for their threads."""
    spec = backend.spec
    policy = CheckpointPolicy(spec.state_bytes, spec.kv_bytes_per_token)
    prefix_cache = PrefixCache(
        spec.components,
        window=spec.window,
        capacity_bytes=capacity_bytes,
        canary=canary,
        policy=policy,
    )
    limits = Limits(
        max_running=num_slots,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        prefill_tokens=chunk,
        deterministic=deterministic,
        forced_chunks=forced_chunks,
        capacity_bytes=capacity_bytes,
    )
    tiers = make_tiers(
        backend,
        prefix_cache,
        host=host,
        disk=store,
        workers=workers,
        batch_bytes=batch_bytes,
        on_grid=deterministic,
    )
    shared = prefix_cache if cache else None
    if suffix_depth:
        drafter = SuffixDrafter(shared)
        speculation = Speculation(drafter, suffix_depth, lambda running: suffix_depth)
    scheduler = Scheduler(backend, limits, shared, tiers=tiers, speculation=speculation)
    scheduler.pace = FixedPace(chunk, costs=scheduler.pace.costs)
    return scheduler


def make_tiers(
    backend: Backend,
    memory: PrefixCache,
    *,
    host: EntryStore | None = None,
    disk: EntryStore | None = None,
    workers: Executor | None = None,
    batch_bytes: int = 1 << 20,
    on_grid: bool = False,
) -> list[tuple[CacheTier, TierIO]]:
    """Below memory, as an engine has them."""
    stores = [(HOST, host), (DISK, disk)]
    there = [(kind, store) for kind, store in stores if store is not None]
    return [
        (
            CacheTier(
                memory,
                store,
                backend.spec,
                backend.payload_arrays,
                canary=Canary("raise"),
                batch_bytes=batch_bytes,
                kind=kind,
                level=level,
                on_grid=on_grid,
            ),
            TierIO(store, allocate=backend.host_memory, writer=workers, reader=workers),
        )
        for level, (kind, store) in enumerate(there)
    ]


def make_loop(
    *,
    overlap: bool = True,
    backend: FakeBackend | None = None,
    components: tuple[Component, ...] = ALL,
    state_taps: bool = True,
    max_len: int = 8192,
    **scheduler: Any,
) -> Loop:
    backend = backend or FakeBackend(
        components=components, state_taps=state_taps, max_len=max_len, num_slots=256
    )
    return Loop(make_scheduler(backend, **scheduler), backend, overlap=overlap)


@dataclass
class Reply:
    """What one client received."""

    id: str
    prompt: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int | None = None
    host_tokens: int = 0
    disk_tokens: int = 0
    peer_tokens: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    finish: FinishReason | None = None
    error: str | None = None
    error_status: int = 0

    def take(self, delta: TokenDelta) -> None:
        assert self.finish is None, f"{delta} came after the terminal message"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs += delta.prompt_logprobs or []
        self.host_tokens += delta.host_tokens
        self.disk_tokens += delta.disk_tokens
        self.peer_tokens += delta.peer_tokens
        if delta.cached_tokens is not None:
            assert self.cached_tokens is None, "cached_tokens is announced once"
            self.cached_tokens = delta.cached_tokens
        self.accepted_drafts, self.rejected_drafts = delta.accepted_drafts, delta.rejected_drafts
        self.finish = delta.finish
        self.error, self.error_status = delta.error, delta.error_status


class Client:
    """Submits to a loop, steps it, and keeps every reply by id."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.replies: dict[str, Reply] = {}

    @property
    def backend(self) -> FakeBackend:
        assert isinstance(self.loop.backend, FakeBackend)
        return self.loop.backend

    def submit(
        self,
        prompt: Sequence[int],
        *,
        id: str | None = None,
        grammar: Grammar | None = None,
        stop_ids: Sequence[int] = (),
        boundaries: Sequence[int] = (),
        priority: int = 0,
        salt: bytes = b"",
        prediction: Sequence[int] = (),
        **params: Any,
    ) -> Reply:
        params = {"temperature": 0.0, "max_tokens": 4} | params
        reply = Reply(id or f"r{len(self.replies)}", list(prompt))
        self.replies[reply.id] = reply
        submit = Submit(
            reply.id,
            pack_tokens(reply.prompt),
            SamplingParams(**params),
            list(stop_ids),
            list(boundaries),
            priority,
            salt,
            pack_tokens(prediction),
        )
        self.loop.submit(submit, grammar)
        return reply

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for delta in self.loop.step():
                self.replies[delta.id].take(delta)

    def run(self) -> None:
        """Step until nothing is left to do."""
        for _ in range(MAX_STEPS):
            if self.loop.idle:
                return
            self.step()
        raise AssertionError(f"not idle after {MAX_STEPS} steps: {self.loop.scheduler.requests}")

    def ask(self, prompt: Sequence[int], **kwargs: Any) -> Reply:
        """Submit and run to the end."""
        reply = self.submit(prompt, **kwargs)
        self.run()
        return reply


def make_client(**kwargs: Any) -> Client:
    return Client(make_loop(**kwargs))


def check_idle(client: Client) -> None:
    """Everything was given back: slots, reservations, locks, rows; the tree adds up."""
    scheduler = client.loop.scheduler
    assert client.loop.idle
    assert not scheduler.running_slots
    assert not scheduler.requests
    assert not scheduler.admission.queue
    assert not scheduler.coming
    assert scheduler.slots.num_free == scheduler.slots.num_slots
    assert scheduler.budget.claimed == 0
    assert not client.backend._rows
    if scheduler.cache is not None:
        assert not scheduler.cache._locks
        check_integrity(scheduler.cache)
    for tiers, _ in scheduler.tiers:
        assert not tiers.cache._locks
        check_tier(tiers)
    held = scheduler.cache.nbytes if scheduler.cache is not None else 0
    assert client.backend.ledger.nbytes == held, "a payload was lost"
    for reply in client.replies.values():
        assert reply.finish is not None, f"{reply.id} never got a terminal message"


def make_prompt(length: int, family: int = 0) -> list[int]:
    """Deterministic tokens; prompts of one family share their beginnings."""
    return [mix(family, position) % 97 for position in range(length)]


def oracle(
    prompt: Sequence[int],
    *,
    components: tuple[Component, ...] = ALL,
    window: int = 8,
    vocab_size: int = 97,
    stop_ids: Sequence[int] = (),
    grammar: Grammar | None = None,
    **params: Any,
) -> tuple[list[int], FinishReason]:
    """The toy model run on one sequence, token by token: no slots, no cache, no scheduler."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": 4} | params))
    state, hashed, reply = 0, [], []
    has_state = Component.STATE in components

    def run(token: int) -> int:
        hashed.append(placed(len(hashed), token))
        return mix(state, token) if has_state else 0

    for token in prompt:
        state = run(token)
    total = sum(hashed)
    while len(reply) < sampling.max_tokens:
        seen = {
            Component.STATE: state,
            Component.ATTENTION: total & MASK,
            Component.WINDOW: sum(hashed[-window:]) & MASK,
        }
        order = (Component.STATE, Component.ATTENTION, Component.WINDOW)
        digests = [len(hashed), *(seen[c] for c in order if c in components)]
        if sampling.temperature:
            assert sampling.seed is not None, "an oracle needs a seed"
            digests += [sampling.seed, len(reply)]
        token = mix(*digests) % vocab_size
        while len(reply) < sampling.min_tokens and token in stop_ids:
            token = (token + 1) % vocab_size
        if grammar is not None:
            token = draw(grammar, token, vocab_size)
            grammar.advance([token])
        state = run(token)
        total += hashed[-1]
        reply.append(token)
        if token in stop_ids and len(reply) > sampling.min_tokens:
            return reply, "stop"
        if len(reply) < sampling.max_tokens and grammar is not None and grammar.finished:
            return reply, "stop"
    return reply, "length"


def draw(grammar: Grammar, token: int, vocab_size: int) -> int:
    """What the toy model draws instead of `token`: it is forced, or among what is allowed."""
    if forced := grammar.forced():
        return forced[0]
    mask = np.zeros(num_words(vocab_size), dtype=np.int32)
    grammar.fill_mask(mask)
    allowed = allowed_ids(mask, vocab_size)
    return int(allowed[token % len(allowed)])


@dataclass
class ToyGrammar:
    """After token t only tokens congruent to t + 1 modulo `modulus` may come.

    With `run`, a token that is congruent to 0 is followed by the next `run` numbers, by force. With
    `length`, the reply is whole after so many tokens.
    """

    modulus: int = 3
    vocab_size: int = 97
    run: int = 0
    length: int | None = None
    last: int = 0
    num_tokens: int = 0
    calls: list[str] = field(default_factory=list)
    slow: bool = False
    _forced: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.num_tokens == self.length

    def fill_mask(self, mask: np.ndarray) -> None:
        self.calls.append("mask")
        mask[:] = pack(np.arange(self.vocab_size) % self.modulus == (self.last + 1) % self.modulus)

    def forced(self) -> list[int]:
        left = len(self._forced) if self.length is None else self.length - self.num_tokens
        return self._forced[:left]

    def advance(self, tokens: Sequence[int]) -> None:
        self.calls.append("advance")
        for token in tokens:
            self._advance(token)

    def _advance(self, token: int) -> None:
        assert not self.finished, "a token came after the end"
        self.num_tokens += 1
        if self._forced:
            assert token == self._forced.pop(0), "a token broke the grammar"
        else:
            allowed = (self.last + 1) % self.modulus
            assert token % self.modulus == allowed, "a token broke the grammar"
            if token % self.modulus == 0:
                self._forced = [(token + i) % self.vocab_size for i in range(1, self.run + 1)]
        self.last = token
