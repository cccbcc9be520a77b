"""A world as cruel as the real one, from one seed: clients, short bytes, a device that fails.

The engine is the real one on the toy backend: real pace (on a clock of its own), real policies, and
states as large as 1,500 tokens of KV. After *each* step the bytes of everything that is alive must
be within capacity and add up; at the end every request has ended exactly once, with the tokens it
would have had alone, and slots, locks and bytes are all back.

    python tools/simulate.py --seed 7        replays one world
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from builders import (
    Client,
    Reply,
    ToyGrammar,
    check_idle,
    loop_clock,
    make_prompt,
    make_tiers,
    oracle,
)
from damage import damage
from integrity import check_integrity, check_tier
from memory_store import MemoryStore
from oracle_drafter import OracleDrafter
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.entries import Bytes, Destination, Entry, Key
from pippin.cache.host_store import HostStore, PinnedEntry
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.tier_io import plain_memory
from pippin.cache.tree.canary import Canary
from pippin.scheduler.admission import LOOKAHEAD, common_prefix_len
from pippin.scheduler.loop import MAX_FAILED_STEPS, Loop
from pippin.scheduler.request import Limits, Request, RunningSlot, Stage
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from pippin.types import Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = ((A, S), (A,), (A, W, S), (A, W), (S,), (W, S))
VOCAB = 97
MAX_LEN = 2048
MAX_DRAIN_STEPS = 60_000
# For the first of those that wait, while slots and bytes are free: eight prompts may pass it, each
# of them a few hundred tokens, in chunks of 32.
MAX_STEPS_IN_LINE = 256
WITHOUT_PROMPTS = 1 / 8  # a step in which streams had the device to themselves counts so much
# In which a request stays set aside though all that it waits for was planned: until the step with
# it has been committed or, for the end of a reply, the step that retires its row.
MAX_STEPS_ASIDE = 8
SWEEP_EVERY = 64  # steps between full counts of the tree

Fault = Literal[
    "launch, nothing done",
    "launch, half done",
    "wait",
    "wait, rows destroyed",
    "sample",
]
FAULTS: tuple[Fault, ...] = (
    "launch, nothing done",
    "launch, half done",
    "wait",
    "wait, rows destroyed",
    "sample",
)


class DeviceError(RuntimeError):
    """What the toy device raises when the world says so."""


@dataclass(frozen=True)
class Setting:
    """What a seed decides of the engine and its machine."""

    components: tuple[Component, ...]
    state_tokens: int
    state_taps: bool
    knows_head: bool
    by_reference: bool
    num_slots: int
    prefill_tokens: int
    capacity_bytes: int
    overlap: bool
    cached: bool
    deterministic: bool
    canary: bool
    fault_rate: float
    arrival_rate: float
    dies: bool  # the device fails for good some time
    disk_bytes: int | None  # of a tier on disk; None: there is none
    disk_fault_rate: float
    damage_rate: float  # of payloads in memory, a bit of which changes

    @classmethod
    def draw(cls, rng: random.Random) -> Setting:
        components = rng.choice(LAYOUTS)
        state_tokens = rng.choice((1500, 1500, 64))
        backend = FakeBackend(components=components, state_tokens=state_tokens)
        rows = rng.choice((1.2, 2.0, 4.0, 12.0))  # of a middling request
        return cls(
            components=components,
            state_tokens=state_tokens,
            state_taps=rng.random() < 0.7,
            knows_head=rng.random() < 0.9,
            by_reference=rng.random() < 0.4,
            num_slots=rng.choice((1, 2, 4, 8, 12)),
            prefill_tokens=rng.choice((32, 100, 256, 512)),
            capacity_bytes=int(rows * backend.row_bytes(rng.choice((150, 500)))),
            overlap=rng.random() < 0.7,
            cached=rng.random() < 0.9,
            deterministic=rng.random() < 0.1,
            canary=rng.random() < 0.2,
            fault_rate=rng.choice((0.0, 0.0, 0.01, 0.05)),
            arrival_rate=rng.choice((0.02, 0.1, 0.4)),
            dies=rng.random() < 0.05,
            disk_bytes=rng.choice((None, 2_000, 20_000, 1 << 30)),
            disk_fault_rate=rng.choice((0.0, 0.0, 0.02, 0.2)),
            damage_rate=rng.choice((0.0, 0.0, 0.02, 0.2)),
        )


class BrokenGrammar(ToyGrammar):
    """Raises at its n-th mask or token."""

    def __init__(self, in_mask: bool, after: int) -> None:
        super().__init__()
        self._in_mask, self._left = in_mask, after

    def _count_down(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("this grammar is broken")

    def fill_mask(self, mask: np.ndarray) -> None:
        if self._in_mask:
            self._count_down()
        super().fill_mask(mask)

    def advance(self, tokens: Sequence[int]) -> None:
        if not self._in_mask:
            self._count_down()
        super().advance(tokens)


@dataclass
class Ask:
    """One client's request, and what must come of it."""

    reply: Reply
    prompt: list[int]
    kwargs: dict[str, Any]
    components: tuple[Component, ...]
    grammar: Callable[[], ToyGrammar] | None
    broken_grammar: bool
    leaves_after: int | None  # tokens; then it aborts, or has seen its stop string
    salt: bytes = b""
    leaves_by: Literal["abort", "finish"] = "abort"
    has_left: bool = False

    @cached_property
    def expected(self) -> tuple[list[int], str]:
        """Asked for in the end: half of all requests never say anything."""
        return oracle(
            self.prompt,
            components=self.components,
            grammar=None if self.grammar is None else self.grammar(),
            **_sampling(self.kwargs),
        )

    def begins_right(self) -> bool:
        """What was said is what would have been said alone, as far as it goes."""
        said = self.reply.tokens
        return self.broken_grammar or not said or said == self.expected[0][: len(said)]


class Workers(Executor):
    """In place of threads: work is done when the world says so, in the order in which it came."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._queue.append((future, lambda: fn(*args, **kwargs)))
        return future

    def advance(self, num_items: int = 1) -> None:
        for _ in range(min(num_items, len(self._queue))):
            future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                future.set_result(work())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.advance(len(self._queue))


class SimulatedDisk(MemoryStore):
    """Full now and then, and what it reads may be damaged: then it is gone."""

    def __init__(self, rng: random.Random, max_bytes: int, fault_rate: float) -> None:
        super().__init__(b"simulated", max_bytes)
        self._rng = rng
        self._fault_rate = fault_rate

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        self.fails = self._rng.random() < self._fault_rate
        return super().write(entry, data)

    def read(self, keys: Sequence[Key], into: Sequence[Destination]) -> list[bool]:
        for key in keys:
            if self._rng.random() < self._fault_rate:
                self.forget([key])
        return super().read(keys, into)


class SimulatedHost(HostStore):
    """Has no room now and then, and bits of what it holds change."""

    def __init__(self, rng: random.Random, max_bytes: int, batch_bytes: int) -> None:
        super().__init__(max_bytes, plain_memory, batch_bytes)
        self._rng = rng
        self._fault_rate = rng.choice((0.0, 0.0, 0.02, 0.2))

    @classmethod
    def draw(cls, seed: str, batch_bytes: int) -> SimulatedHost | None:
        """Every second world has one. Its numbers are its own: the other worlds stay the same."""
        rng = random.Random(f"host {seed}")
        num_batches = rng.choice((0, 0, 0, 3, 20, 100))
        return cls(rng, num_batches * 2 * batch_bytes, batch_bytes) if num_batches else None

    def write(self, entry: Entry, data: Sequence[Bytes]) -> bool:
        return self._rng.random() >= self._fault_rate and super().write(entry, data)

    def pin(self, key: Key) -> PinnedEntry | None:
        if self._rng.random() < self._fault_rate and key in self._places:
            kept = self._places[key]
            kept.area.memory[kept.at] ^= 1 << self._rng.randrange(8)
        return super().pin(key)


@dataclass(frozen=True)
class Drafting:
    """Who drafts, how well, and how deep. Two in three worlds have drafts; the others stay as they
    were."""

    kind: Literal["none", "oracle", "device", "both"]
    max_depth: int
    share_right: float

    @classmethod
    def draw(cls, seed: int) -> Drafting:
        rng = random.Random(f"drafts {seed}")
        kind = rng.choice(("none", "oracle", "device"))
        depth, share = rng.choice((1, 2, 3, 7)), rng.choice((0.0, 0.3, 0.8, 0.95, 1.0))
        return cls("both" if kind == "device" and rng.random() < 0.5 else kind, depth, share)

    def speculation(
        self, rng: random.Random, reply_of: Callable[[Request], Sequence[int]]
    ) -> Speculation | None:
        if self.kind == "none":
            return None
        most = self.max_depth if self.kind == "device" else (self.max_depth + 1) // 2
        return Speculation(
            None if self.kind == "device" else OracleDrafter(reply_of, self.share_right, VOCAB),
            self.max_depth,
            lambda running: rng.randint(0, self.max_depth),
            device=None if self.kind == "oracle" else DeviceDrafter("toy", most),
        )


NO_DRAFTS = Drafting("none", 0, 0.0)


class SimulatedBackend(FakeBackend):
    """Finishes when it likes, takes time on a clock of its own, and fails when it is told to."""

    def __init__(self, rng: random.Random, setting: Setting, drafting: Drafting) -> None:
        super().__init__(
            components=setting.components,
            vocab_size=VOCAB,
            max_len=MAX_LEN,
            num_slots=setting.num_slots,
            state_taps=setting.state_taps,
            state_tokens=setting.state_tokens,
            knows_head=setting.knows_head,
            restores_by_reference=setting.by_reference,
            max_depth=0 if drafting.kind == "none" else drafting.max_depth,
            draft_share=drafting.share_right,
        )
        self._rng = rng
        self._costs = [rng.uniform(0.5, 20.0) * 1e-3 for _ in range(2)]
        self._row_seconds, self._token_seconds = rng.uniform(0, 1e-3), rng.uniform(1e-5, 5e-4)
        self._free_at = 0.0
        self.now = 0.0
        self.next_fault: Fault | None = None
        self.faulty_plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> FakePending:
        self.device_queue.advance(self._rng.randrange(4))
        fault, self.next_fault = self.next_fault, None
        if fault == "sample" and not plan.masked_slots:
            fault = "wait"
        if fault is not None:
            self.faulty_plans.append(plan)
        if fault == "launch, nothing done":
            raise DeviceError("out of memory")
        if fault == "launch, half done":
            part = StepPlan(plan.step, plan.retire, plan.admit[: len(plan.admit) // 2])
            super().launch(part).discard()
            raise DeviceError("out of memory")
        pending = super().launch(plan)
        pending.dispatched = self.now
        self._take_time(plan, pending, fault)
        self.device_queue.advance(self._rng.randrange(4))
        return pending

    def _take_time(self, plan: StepPlan, pending: FakePending, fault: Fault | None) -> None:
        tokens = sum(len(row.tokens) for row in plan.prefill)
        seconds = (self._costs[0] + self._row_seconds * len(plan.decode)) * bool(plan.decode)
        seconds += (self._costs[1] + self._token_seconds * tokens) * bool(tokens)
        pause = self._rng.choice((1.0,) * 50 + (30.0,))
        self._free_at = max(self.now, self._free_at) + seconds * pause
        done_at, finish = self._free_at, pending.wait

        def wait() -> StepResult:
            self.now = max(self.now, done_at)
            if fault == "wait, rows destroyed":
                self.device_queue.run_until(plan.step)
                for row in plan.rows:
                    if row.slot in self._rows:
                        self._rows[row.slot].destroy()
            if fault in ("wait", "wait, rows destroyed"):
                raise DeviceError("the device was lost")
            return finish()

        def sample(masks: Any) -> None:
            raise DeviceError("no sampling today")

        pending.wait = wait  # type: ignore[method-assign]
        if fault == "sample":
            pending.sample = sample  # type: ignore[method-assign]


@dataclass
class World:
    seed: int
    num_steps: int  # in which clients come; then all is left to end
    drafts: bool = True  # False: none, whatever the seed says
    steps_run: int = 0
    asks: list[Ask] = field(default_factory=list)
    by_id: dict[str, Ask] = field(default_factory=dict)  # those without grammars
    leaving: list[Ask] = field(default_factory=list)  # those who will not wait for their end
    doomed: set[str] = field(default_factory=set)  # had a row in a step that failed
    aside: dict[tuple[str, RunningSlot], int] = field(default_factory=dict)  # steps, for nothing
    first: tuple[str | None, float] = (None, 0)  # in line, though there is room; for so many steps

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.setting = Setting.draw(self.rng)
        self.drafting = Drafting.draw(self.seed) if self.drafts else NO_DRAFTS
        self.backend = SimulatedBackend(self.rng, self.setting, self.drafting)
        setting = self.setting
        self.disk = None
        if setting.cached and setting.disk_bytes is not None:
            self.disk = SimulatedDisk(self.rng, setting.disk_bytes, setting.disk_fault_rate)
        self.host: SimulatedHost | None = None  # of the engine that runs
        self.workers = Workers()
        self.client = Client(self._make_loop(self.backend))
        self._num_faults = 0  # in a row
        self._asks_alike = random.Random(f"choices {self.seed}").random() < 0.5
        self._num_salts = random.Random(f"salts {self.seed}").choice((1, 1, 2, 4))

    def _make_loop(self, backend: SimulatedBackend) -> Loop:
        setting, spec = self.setting, backend.spec
        cache = None
        if setting.cached:
            cache = PrefixCache(
                spec.components,
                window=spec.window,
                capacity_bytes=setting.capacity_bytes,
                canary=Canary("raise") if setting.canary else None,
                policy=CheckpointPolicy(
                    spec.state_bytes,
                    spec.kv_bytes_per_token,
                    prompt_budget_bytes=setting.capacity_bytes // 4,
                ),
            )
        limits = Limits(
            max_running=setting.num_slots,
            max_queue=64,
            max_queue_tokens=20_000,
            prefill_tokens=setting.prefill_tokens,
            deterministic=setting.deterministic,
            capacity_bytes=setting.capacity_bytes,
        )
        tiers = []
        if cache is not None:
            batch_bytes = self.rng.choice((1_000, 100_000)) if self.disk is not None else 1_000
            self.host = SimulatedHost.draw(f"{self.seed} {self.steps_run}", batch_bytes)
            tiers = make_tiers(
                backend,
                cache,
                host=self.host,
                disk=self.disk,
                workers=self.workers,
                batch_bytes=batch_bytes,
                on_grid=setting.deterministic,
            )
        speculation = self.drafting.speculation(
            random.Random(f"depths {self.seed}"), self._reply_of
        )
        scheduler = Scheduler(backend, limits, cache, tiers=tiers, speculation=speculation)
        scheduler.traffic.clock = lambda: backend.now
        if tiers:
            scheduler.traffic.wait = lambda seconds: self._wait(backend, seconds)
        return Loop(scheduler, backend, overlap=setting.overlap)

    def _reply_of(self, request: Request) -> Sequence[int]:
        """What it will say, if that is known."""
        ask = self.by_id.get(request.id)
        return () if ask is None else ask.expected[0]

    def _wait(self, backend: SimulatedBackend, seconds: float) -> bool:
        backend.now += seconds
        self.workers.advance()
        return True

    # ---- a run -----------------------------------------------------------------------------

    def run(self) -> None:
        with loop_clock(self.backend):
            for _ in range(self.num_steps):
                self._clients_act()
                self._step()
            self._drain()
        self._check_end()
        self._restart()

    def _drain(self) -> None:
        for _ in range(MAX_DRAIN_STEPS):
            if self.client.loop.idle:
                return
            self._leave()
            self._step()
        raise AssertionError(f"not idle after {MAX_DRAIN_STEPS} steps")

    def _step(self) -> None:
        self._draw_fault()
        self._damage()
        self.workers.advance(self.rng.randrange(4))
        num_faulty = len(self.backend.faulty_plans)
        owners = {
            slot: h.request.id for slot, h in self.client.loop.scheduler.running_slots.items()
        }
        self.client.step()
        self.steps_run += 1
        owners |= {s: h.request.id for s, h in self.client.loop.scheduler.running_slots.items()}
        for plan in self.backend.faulty_plans[num_faulty:]:
            self.doomed |= {owners[row.slot] for row in plan.rows if row.slot in owners}
        self._check_step()

    def _draw_fault(self) -> None:
        setting = self.setting
        dying = setting.dies and self.steps_run > self.num_steps // 2
        faulty = self.rng.random() < setting.fault_rate and self._num_faults < MAX_FAILED_STEPS - 1
        if dying or faulty:
            self.backend.next_fault = self.rng.choice(FAULTS)
        self._num_faults = self._num_faults + 1 if faulty else 0

    def _damage(self) -> None:
        """Some bit of the tree changes; with a canary that raises, the engine would end."""
        cache, rng = self.client.loop.scheduler.cache, self.rng
        if cache is None or self.setting.canary or rng.random() >= self.setting.damage_rate:
            return
        held = [payload for node in cache.radix.nodes() for payload in node.payloads if payload]
        if held:
            damage(rng.choice(held))

    # ---- clients ---------------------------------------------------------------------------

    def _clients_act(self) -> None:
        if self.client.loop.failure is not None:
            return
        while self.rng.random() < self.setting.arrival_rate:
            self._ask()
        if self.rng.random() < 0.002:  # branches behind a long prompt, more than are looked at
            trunk = make_prompt(MAX_LEN // 3, 500_000 + len(self.asks))
            for number in range(LOOKAHEAD + 4):
                self._ask([*trunk, number])
        alike = random.Random(f"choices {self.seed} {self.steps_run}")
        if self._asks_alike and self.asks and alike.random() < 0.03:  # as `n` > 1 does
            prompt = self._prompt()
            for _ in range(alike.choice((2, 4))):
                self._ask(prompt)
        self._leave()
        if self.rng.random() < 0.002:
            self.client.loop.flush_cache()
        if self.rng.random() < 0.01:
            self.client.loop.status()

    def _ask(self, prompt: list[int] | None = None) -> None:
        rng = self.rng
        prompt = prompt or self._prompt()
        modulus = rng.choice((None,) * 6 + (3, 4))
        kwargs: dict[str, Any] = {
            "max_tokens": min(_log_uniform(rng, 1, 500), MAX_LEN - len(prompt)),
            "min_tokens": rng.choice((0, 0, 5)),
            "stop_ids": list(range(rng.choice((0, 0, 2)))),
            "temperature": 1.0,
            "seed": rng.randrange(1 << 30),
            "logprobs": rng.choice((None, None, 2)),
        }
        if rng.random() < 0.3:
            kwargs["temperature"] = 0.0
        toys = random.Random(f"{self.seed} {len(self.asks)}")
        run, length = toys.choice((0, 2, 7, 40)), toys.choice((None, None, toys.randrange(1, 60)))
        grammar = None
        if modulus is not None:
            grammar = partial(ToyGrammar, modulus, run=run, length=length)
        broken = rng.random() < 0.02
        given = None if grammar is None else grammar()
        if broken:
            given = BrokenGrammar(rng.random() < 0.5, after=rng.randrange(4))
        salt = toys.choice((b"", b"one", b"two", b"three")[: self._num_salts])
        reply = self.client.submit(
            prompt,
            grammar=given,
            salt=salt,
            boundaries=sorted({rng.randrange(len(prompt) + 1) for _ in range(2)}),
            priority=rng.choice((0, 0, 0, 1, -1)),
            prompt_logprobs=rng.choice((None,) * 9 + (1,)),
            **kwargs,
        )
        ask = Ask(
            reply,
            prompt,
            kwargs,
            self.setting.components,
            grammar,
            broken,
            leaves_after=rng.randrange(60) if rng.random() < 0.15 else None,
            leaves_by=rng.choice(("abort", "finish")),
            salt=salt,
        )
        self.asks.append(ask)
        if grammar is None and not broken:
            self.by_id[reply.id] = ask
        if ask.leaves_after is not None:
            self.leaving.append(ask)

    def _prompt(self) -> list[int]:
        rng = self.rng
        own = make_prompt(_log_uniform(rng, 1, 400), 1000 + len(self.asks))
        kind = rng.random()
        if kind > 0.9 and self.asks:  # the same again
            return rng.choice(self.asks[-20:]).prompt
        if kind < 0.3 and self.asks:  # the next turn of a conversation
            before = rng.choice(self.asks[-20:])
            prompt = [*before.prompt, *before.reply.tokens, *own[:60]]
            if len(prompt) < MAX_LEN // 2:
                return prompt
        if kind < 0.6:  # what many begin with
            return [*make_prompt(rng.choice((20, 64, 150, 300)), rng.randrange(2)), *own]
        return own

    def _leave(self) -> None:
        loop = self.client.loop
        self.leaving = [ask for ask in self.leaving if ask.reply.finish is None]
        for ask in self.leaving:
            assert ask.leaves_after is not None
            if not ask.has_left and len(ask.reply.tokens) >= ask.leaves_after:
                ask.has_left = True
                (loop.abort if ask.leaves_by == "abort" else loop.finish)(ask.reply.id)

    # ---- what must hold --------------------------------------------------------------------

    def _check_step(self) -> None:
        loop, capacity = self.client.loop, self.setting.capacity_bytes
        scheduler = loop.scheduler
        if loop.failure is not None:
            return
        tree = scheduler.cache.nbytes if scheduler.cache is not None else 0
        claimed = sum(h.nbytes + h.checkpoint_bytes for h in scheduler.running_slots.values())
        claimed += sum(inflight.transient_bytes for inflight in scheduler.inflight_steps.values())
        claimed += scheduler.traffic.claimed_bytes
        assert scheduler.budget.claimed == claimed, "claims do not add up"
        assert claimed + tree <= capacity, "claims and the tree are over capacity"
        alive = self.backend.memory_used()
        assert alive <= capacity, f"{alive:,} bytes are alive, the budget holds {capacity:,}"
        assert scheduler.slots.num_free + len(scheduler.running_slots) == scheduler.slots.num_slots
        for running in scheduler.running_slots.values():
            assert running.row_len <= running.row_tokens, "a row is larger than its claim"
        self._check_queue()
        if scheduler.cache is not None and self.steps_run % SWEEP_EVERY == 0:
            check_integrity(scheduler.cache)
            for tiers, _ in scheduler.tiers:
                check_tier(tiers)

    def _check_queue(self) -> None:
        """No request waits for a prefill that has a lower priority than itself, or for what does
        not come any more; and the first in line starts soon while there are slots and bytes."""
        admission = self.client.loop.scheduler.admission
        for request, running in _promises(admission.queue):
            assert running.priority >= request.priority, "a prefill did not inherit a priority"
        aside = sum(request.promise is not None for request in admission.queue)
        assert aside == admission.num_aside, "the queue does not add up"
        self._check_aside()
        first = admission.eligible[0] if admission.eligible else None
        if first is None or not self._has_room(first):
            self.first = None, 0
            return
        before, num_steps = self.first
        records = self.client.loop.scheduler.metrics.records
        counts = 1 if not records or records[-1].prefill_tokens else WITHOUT_PROMPTS
        self.first = first.id, num_steps + counts if before == first.id else 0
        assert self.first[1] < MAX_STEPS_IN_LINE, f"{first.id} waits with slots and bytes free"

    def _check_aside(self) -> None:
        """A request that waits by choice is in line again soon after all that it waits for was
        planned, in steps in which a slot is free for it."""
        before, self.aside = self.aside, {}
        for request, running in _promises(self.client.loop.scheduler.admission.queue):
            if _is_planned(running):
                pair = request.id, running
                self.aside[pair] = before.get(pair, 0) + self._takes_any()
                behind = f"{request.id} is set aside behind {running.request.id}, for nothing"
                assert self.aside[pair] <= MAX_STEPS_ASIDE, behind

    def _takes_any(self) -> bool:
        """Whether requests may start at all. Replies that may not be resumed (deterministic) never
        need what others have: one that might has the engine to itself."""
        scheduler = self.client.loop.scheduler
        if not scheduler.slots.num_free:
            return False
        running = scheduler.running
        return not scheduler.limits.deterministic or all(
            one.row_tokens >= one.request.max_total for one in running
        )

    def _has_room(self, request: Request) -> bool:
        scheduler = self.client.loop.scheduler
        if not self._takes_any():
            return False
        if scheduler.admission.refused is not None:  # one that may not be passed over lacks bytes
            return False
        need = scheduler.costs.row_bytes(request.max_total)
        return 2 * need < scheduler.budget.available

    def _restart(self) -> None:
        """Another engine finds what this one wrote: killed, or stopped in good order."""
        if self.disk is None or self.client.loop.failure is not None:
            return
        with loop_clock(self.backend):
            if self.rng.random() < 0.5:
                self.client.loop.close()
        self.workers = Workers()
        self.by_id = {}
        backend = SimulatedBackend(self.rng, self.setting, self.drafting)
        client = Client(self._make_loop(backend))
        known = [a for a in self.asks[-12:] if not a.broken_grammar and a.grammar is None]
        with loop_clock(backend):
            for ask in known:
                self.workers.advance(self.rng.randrange(8))
                if self._num_salts > 1:
                    stranger = client.ask(ask.prompt, salt=ask.reply.id.encode(), max_tokens=1)
                    own = (stranger.cached_tokens or 0) - stranger.peer_tokens
                    assert not own, f"another salt has {ask.reply.id}'s prefix"
                reply = client.ask(ask.prompt, salt=ask.salt, **ask.kwargs)
                right = (reply.tokens, reply.finish) == ask.expected
                assert right or self._may_fail(ask), f"{ask.reply.id}: other tokens after a restart"
            for tiers, _ in client.loop.scheduler.tiers:
                check_tier(tiers)

    def _check_end(self) -> None:
        failure = self.client.loop.failure
        if failure is None:
            check_idle(self.client)
        for ask in self.asks:
            assert ask.reply.finish is not None, f"{ask.reply.id} never ended"
            self._check_reply(ask, died=failure is not None)
        if self._num_salts > 1:
            self._check_salts()

    def _check_salts(self) -> None:
        """What a request did not compute began a prompt or a reply of its own salt."""
        known = [(ask, np.array([*ask.prompt, *ask.reply.tokens])) for ask in self.asks]
        for ask, tokens in known:
            others = (o for other, o in known if other is not ask and other.salt == ask.salt)
            most = max((common_prefix_len(tokens, other) for other in others), default=0)
            cached = (ask.reply.cached_tokens or 0) - ask.reply.peer_tokens
            assert cached <= most, f"{ask.reply.id}: {cached} tokens cached, its salt has {most}"

    def _check_reply(self, ask: Ask, *, died: bool) -> None:
        reply = ask.reply
        name = f"{reply.id} ({len(ask.prompt)} tokens, {ask.kwargs})"
        assert ask.begins_right(), f"{name}: wrong tokens"
        if reply.finish == "error":
            assert died or self._may_fail(ask), f"{name} failed: {reply.error}"
        elif reply.finish == "abort" or ask.has_left:
            assert ask.has_left, f"{name} was aborted by nobody"
        else:
            assert ask.broken_grammar or (reply.tokens, reply.finish) == ask.expected, name

    def _may_fail(self, ask: Ask) -> bool:
        """A step of its own failed, its grammar did, it was refused, or is too large even alone."""
        refused = not ask.reply.tokens and "waiting" in (ask.reply.error or "")
        if ask.reply.id in self.doomed or ask.broken_grammar or refused:
            return True
        total = len(ask.prompt) + len(ask.expected[0])
        return self.backend.row_bytes(total) > self.setting.capacity_bytes


def _promises(queue: Sequence[Request]) -> list[tuple[Request, RunningSlot]]:
    """Each request that waits by choice, and what it waits for."""
    return [(one, one.promise.running) for one in queue if one.promise is not None]


def _is_planned(running: RunningSlot) -> bool:
    """Whether no later step computes more of what requests wait for."""
    request = running.request
    if running.stage is not Stage.RUNNING:
        return True
    if request.completed:  # the rest of its reply is run, and then all of it captured
        return running.row_len >= request.num_tokens
    return request.phase != "prefill"


def _sampling(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "logprobs"}


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def simulate(seed: int, num_steps: int, *, drafts: bool = True) -> int:
    """Run one world; returns how many steps it took. Raises AssertionError naming the seed."""
    world = World(seed, num_steps, drafts)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(
            f"seed {seed}, step {world.steps_run}: {error}\n"
            f"{world.setting}\n{world.drafting}\n"
            f"replay: python tools/simulate.py --seed {seed} --length {num_steps}"
        ) from error
    return world.steps_run
