"""Two engines on the toy model and a wire between them that does what a test says, or a seed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from builders import ALL, Client, Reply, make_loop
from pippin.backends.fake import FakeBackend
from pippin.cache.entries import Bytes, Entry
from pippin.cache.peer_store import Arrival, PeerStore, Wanted
from pippin.cache.tiers.cache_tier import PEER, CacheTier
from pippin.cache.tiers.tier_io import TierIO, plain_memory
from pippin.cache.tree.canary import Canary
from pippin.messages import Submit, pack_tokens
from pippin.scheduler.scheduler import Scheduler
from pippin.scheduler.spills import Pushes, PushTarget
from pippin.types import SamplingParams
from simulator import Workers

FINGERPRINT = b"toy"
BATCH_BYTES = 8_192


class Wire:
    """Both ends of a connection. Messages are delivered in order, when `deliver` is called.

    With an `rng`, some entries are lost, damaged, sent twice or late, and some ends are lost.
    """

    def __init__(self, rng: random.Random | None = None, fault_rate: float = 0.0) -> None:
        self.connected = True
        self.store: PeerStore | None = None  # of the decode engine
        self.prefill: Client | None = None
        self.asked: list[Wanted] = []
        self.cancelled: list[str] = []
        self.sent: list[tuple[str, Entry]] = []
        self.workers = Workers()
        self.damages = False
        self._rng = rng or random.Random(0)
        self._fault_rate = fault_rate
        self._to_prefill: deque[Callable[[], None]] = deque()
        self._to_decode: deque[Callable[[], None]] = deque()
        self._num_submits = 0
        self._is_full = False  # the decode engine's store, for now

    # ---- what the decode engine calls ------------------------------------------------------

    def ask(self, wanted: Wanted) -> bool:
        if not self.connected or self.prefill is None:
            return False
        self.asked.append(wanted)
        self._to_prefill.append(lambda: self._submit(wanted))
        return True

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        self._to_prefill.append(lambda: self._abort(id))

    def report(self) -> list[dict[str, Any]]:
        return [{"address": "simulated", "connected": self.connected, "error": None}]

    def close(self) -> None:
        self.connected = False

    # ---- what the prefill engine calls -----------------------------------------------------

    def send(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> bool:
        if not self.connected or self._faulty():
            return False
        self.sent.append((id, entry))
        copies = [part.copy() for part in data]
        if self.damages or self._faulty():
            copies[0][0] ^= 1
        if not self._faulty():
            self._to_decode.append(lambda: self._arrive(id, entry, copies, digest))
        if self._faulty():
            self._to_decode.append(lambda: self._arrive(id, entry, copies, digest))
        return True

    def end(self, id: str, reason: str) -> None:
        if self.connected and not self._faulty():
            self._to_decode.append(lambda: self._end(id, reason))

    # ---- what the world does ---------------------------------------------------------------

    def deliver(self, most: int = 1_000_000) -> None:
        self._is_full = False
        for queue in (self._to_prefill, self._to_decode):
            for _ in range(min(most, len(queue))):
                if not self._is_full:
                    queue.popleft()()

    def disconnect(self) -> None:
        """What was on its way is lost, and both ends are told so."""
        self.connected = False
        self._to_prefill.clear()
        self._to_decode.clear()
        for wanted in self.asked:
            self._end(wanted.id, "disconnected")
            self._abort(wanted.id)
        self.asked.clear()

    def _faulty(self) -> bool:
        return self._rng.random() < self._fault_rate

    def _submit(self, wanted: Wanted) -> None:
        client = self.prefill
        if client is None or client.loop.failure is not None:
            return
        pushes = client.loop.scheduler.pushes
        assert pushes is not None
        pushes.targets[wanted.id] = PushTarget(wanted, self, self.workers, BATCH_BYTES)
        client.replies[wanted.id] = Reply(wanted.id)
        client.loop.submit(
            Submit(
                wanted.id,
                pack_tokens(wanted.tokens),
                SamplingParams(max_tokens=1, temperature=0.0),
                boundaries=list(wanted.boundaries),
                priority=wanted.priority,
                salt=wanted.salt,
                handover=wanted.id,
            )
        )

    def _abort(self, id: str) -> None:
        if self.prefill is not None and self.prefill.loop.failure is None:
            self.prefill.loop.abort(id)

    def _arrive(self, id: str, entry: Entry, data: Sequence[Bytes], digest: bytes) -> None:
        assert self.store is not None
        wanted = next((one for one in self.asked if one.id == id), None)
        if wanted is None:
            return
        found = wanted.entry(
            FINGERPRINT, lambda c, n: entry.arrays, entry.key.component, entry.start, entry.end
        )
        assert found == entry, "the two ends name an entry differently"
        match self.store.arrive(id, found, data, digest):
            case Arrival.NO_ROOM if id not in self.cancelled:
                self._to_decode.appendleft(lambda: self._arrive(id, entry, data, digest))
                self._is_full = True
            case Arrival.DAMAGED:
                self._end(id, "damaged")

    def _end(self, id: str, reason: str) -> None:
        if self.store is not None:
            self.store.end(id, reason)


def add_peer_tier(scheduler: Scheduler, wire: Wire, max_bytes: int = 1 << 20) -> None:
    """The last tier of a scheduler that has just been made."""
    backend = scheduler.costs
    assert isinstance(backend, FakeBackend)
    assert scheduler.cache is not None
    store = PeerStore(max_bytes, plain_memory, BATCH_BYTES, FINGERPRINT, wire)
    wire.store = store
    tier = CacheTier(
        scheduler.cache,
        store,
        backend.spec,
        backend.payload_arrays,
        canary=Canary("raise"),
        batch_bytes=BATCH_BYTES,
        kind=PEER,
        level=len(scheduler.tiers),
        on_grid=scheduler.limits.deterministic,
    )
    tier_io = TierIO(store, writer=wire.workers, reader=wire.workers)
    scheduler.tiers = (*scheduler.tiers, (tier, tier_io))
    _renew_traffic(scheduler)


def add_pushes(scheduler: Scheduler) -> None:
    backend = scheduler.costs
    assert isinstance(backend, FakeBackend)
    assert scheduler.cache is not None
    scheduler.pushes = Pushes(
        scheduler.cache,
        backend,
        backend.payload_arrays,
        fingerprint=FINGERPRINT,
        batch_bytes=BATCH_BYTES,
    )
    _renew_traffic(scheduler)


def _renew_traffic(scheduler: Scheduler) -> None:
    clock, pace = scheduler.traffic.clock, scheduler.pace
    scheduler.__post_init__()
    scheduler.pace = pace
    scheduler.traffic.clock = clock


class Pair:
    """A prefill engine and a decode engine. The decode engine's model is slow."""

    def __init__(
        self,
        wire: Wire | None = None,
        *,
        knows_head: bool = True,
        decode: Any = None,
        **kwargs: Any,
    ) -> None:
        """`decode`: options of the decode engine alone."""
        self._knows_head = knows_head
        self.wire = wire or Wire()
        self.now = 0.0
        self.prefill = self._client(dict(kwargs))
        add_pushes(self.prefill.loop.scheduler)
        self.decode = self._client(kwargs | (decode or {}))
        add_peer_tier(self.decode.loop.scheduler, self.wire)
        self.wire.prefill = self.prefill
        for client in (self.prefill, self.decode):
            traffic = client.loop.scheduler.traffic
            traffic.clock = lambda: self.now
            traffic.wait = lambda seconds: False  # type: ignore[method-assign]

    def _client(self, kwargs: dict[str, Any]) -> Client:
        components, max_len = kwargs.pop("components", ALL), kwargs.pop("max_len", 8192)
        backend = FakeBackend(
            components=components, num_slots=256, max_len=max_len, knows_head=self._knows_head
        )
        client = Client(make_loop(**({"chunk": 64, "backend": backend} | kwargs)))
        client.loop.scheduler.pace.compute_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
        return client

    @property
    def handovers(self) -> dict[str, Any]:
        """The decode engine's counters."""
        peer = self.decode.loop.counters()["peer"]
        return dict(peer["handovers"])

    @property
    def pushes(self) -> dict[str, Any]:
        return dict(self.prefill.loop.counters()["pushes"])

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.wire.deliver()
            if not self.prefill.loop.idle:
                self.prefill.step()
            self.wire.workers.advance(9)
            self.wire.deliver()
            if not self.decode.loop.idle:
                self.decode.step()
            self.wire.workers.advance(9)

    def run(self) -> None:
        for _ in range(2_000):
            if self.decode.loop.idle and self.prefill.loop.idle:
                return
            self.step()
        raise AssertionError("not idle")

    def ask(self, prompt: Sequence[int], **kwargs: Any) -> Reply:
        reply = self.decode.submit(prompt, **kwargs)
        self.run()
        return reply
