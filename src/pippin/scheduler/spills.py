"""What is written behind: sequences that memory holds and a tier, or another engine, lacks.

One batch is on its way at a time: payloads of one sequence, planned into a step, handed to the
`TierIO` when that step is committed, and in the tier's tree when they have been written. So what is
missing there is always the difference of two trees.

    memory ──step──▶ host ──▶ disk       each sequence, when the host has what it takes of it
       └───────step────────────┘         only what the host does not have, or not any more
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

import numpy as np

from pippin.backends.base import Costs, Spill, Spilled
from pippin.cache.entries import Entry, Key
from pippin.cache.peer_store import DecodePeer, OutgoingStore, Wanted
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import OUTGOING, STATE_STRIDE, CacheTier, Format, Run
from pippin.cache.tiers.tier_io import PieceSource, TierIO
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.radix import Node
from pippin.scheduler.request import Request

MAX_SEQUENCES = 4096  # that wait to be written; the oldest is forgotten then
MAX_WAITING_BYTES = 64 << 20  # of their tokens, in the host's memory; likewise
LOOKS = 4  # sequences of which nothing may be missing, in one plan
PAUSE = 5.0  # seconds, after something could not be written

logger = logging.getLogger(__name__)


@dataclass
class SpillBatch:
    name: str
    tokens: np.ndarray
    salt: bytes
    entries: list[Entry]
    step: int | None  # None: of copies that the tier above has
    future: Future[list[bool]] | None = None  # once its step has been committed
    is_wanted: bool = True  # False: the tiers were flushed since


class Spills:
    def __init__(self, tiers: CacheTier, tier_io: TierIO, above: Spills | None = None) -> None:
        """`above`: of the faster tier whose copies are written to this one, where it has them."""
        self._above = above
        self._below: Spills | None = None
        if above is not None:
            above._below = self
        self._tiers = tiers
        self._tier_io = tier_io
        # Tokens and salt by request; the longest waiting first.
        self._waiting: dict[str, tuple[np.ndarray, bytes]] = {}
        self._waiting_bytes = 0
        self._batch: SpillBatch | None = None
        self._not_before = 0.0
        self._current = ""  # the sequence that is being written, in as many batches as it takes
        self._written: set[Key] = set()  # of it

    def busy(self, now: float) -> bool:
        """Whether there is something to be done for it now."""
        return self._batch is not None or (bool(self._waiting) and now >= self._not_before)

    @property
    def writes(self) -> bool:
        return self._batch is not None

    @property
    def waits(self) -> bool:
        """Whether something is to be written, and no batch is on its way."""
        batch = self._batch
        is_written = batch is None or (batch.future is not None and batch.future.done())
        return is_written and bool(self._waiting)

    @property
    def futures(self) -> list[Future[list[bool]]]:
        batch = self._batch
        return [] if batch is None or batch.future is None else [batch.future]

    def note(self, request_id: str, tokens: np.ndarray, salt: bytes = b"") -> None:
        """The tree in memory holds more of this sequence than before."""
        self._drop(request_id)
        self._waiting[request_id] = tokens, salt
        self._waiting_bytes += tokens.nbytes
        if request_id == self._current:
            self._current = ""
        while len(self._waiting) > 1 and (
            len(self._waiting) > MAX_SEQUENCES or self._waiting_bytes > MAX_WAITING_BYTES
        ):
            self._pass_on(next(iter(self._waiting)))

    def _pass_on(self, name: str) -> None:
        """A sequence does not wait any longer: it is the turn of the tier below."""
        if name in self._waiting and self._below is not None:
            self._below.note(name, *self._waiting[name])
        self._drop(name)

    def _drop(self, name: str) -> None:
        tokens, _ = self._waiting.pop(name, (None, b""))
        if tokens is not None:
            self._waiting_bytes -= tokens.nbytes

    def hurry(self) -> bool:
        """Let nothing wait any longer; whether there is anything to be written."""
        self._not_before = 0.0
        return self._batch is not None or bool(self._waiting)

    def pass_all_on(self) -> None:
        for name in list(self._waiting):
            self._pass_on(name)

    def forget(self) -> None:
        """What waits was dropped from memory."""
        self._waiting.clear()
        self._waiting_bytes = 0

    def flush(self) -> None:
        """What waits is not written, and what is on its way not kept."""
        self.forget()
        if self._batch is not None:
            self._batch.is_wanted = False

    def plan(self, step: int, now: float) -> tuple[Spill, ...]:
        self.poll(now)
        if self._batch is not None or now < self._not_before:
            return ()
        if self._tiers.cache.flushing:  # the store may yet be asked to forget these keys
            return ()
        for _ in range(LOOKS):
            if not self._waiting:
                break
            name, (tokens, salt) = next(iter(self._waiting.items()))
            runs, copies = self._missing(tokens, salt)
            if name != self._current:
                self._current, self._written = name, set()
            if not runs:
                self._pass_on(name)
                keys = self._tiers.keys_along(tokens, salt)
                self._tier_io.tell(self._tier_io.store.touch, keys)
                continue
            entries = self._tiers.entries(tokens, runs, salt)
            if not self._written.isdisjoint(entry.key for entry in entries):
                self._pass_on(name)  # its beginning went to make room for its end
                continue
            batch_step = None if copies else step
            self._batch = SpillBatch(name, tokens, salt, entries, batch_step)
            nbytes = sum(entry.nbytes for entry in entries)
            self._not_before = now + nbytes / self._tiers.kind.max_bytes_written
            if copies:
                self._batch.future = self._tier_io.write(entries, copies)
                return ()
            self._tiers.stats.device_bytes += nbytes
            return tuple(Spill(run.component, run.payloads) for run in runs)
        return ()

    def _missing(self, tokens: np.ndarray, salt: bytes) -> tuple[list[Run], list[PieceSource]]:
        if self._above is not None:
            above, tier_io = self._above._tiers, self._above._tier_io
            runs = self._tiers.missing(tokens, salt, above)
            pieces = above.pieces(runs)
            if pieces:
                specs = [above.format(piece.component, piece.num_tokens) for piece in pieces]
                return runs, [PieceSource(tier_io, *one) for one in zip(pieces, specs, strict=True)]
        return self._tiers.missing(tokens, salt), []

    def commit(self, step: int, spilled: Iterator[Spilled], now: float) -> None:
        """Write what a step has copied for this tier."""
        batch = self._batch
        if batch is None or batch.step != step:
            return
        sources = list(itertools.islice(spilled, len(batch.entries)))
        if not all(source.intact for source in sources):
            self._refuse(batch, sources, now)
            return
        batch.future = self._tier_io.write(batch.entries, sources)

    def _refuse(self, batch: SpillBatch, spilled: Sequence[Spilled], now: float) -> None:
        """Some of it has changed in memory: it must never be read again."""
        self._give_up(batch, now)
        for entry, source in zip(batch.entries, spilled, strict=True):
            source.release()
            if not source.intact:
                tokens, component = batch.tokens[: entry.end], entry.key.component
                self._tiers.memory.condemn(tokens, component, entry.start, batch.salt)

    def fail_step(self, step: int, now: float) -> None:
        """Perhaps because of what was spilled: this sequence is not tried again."""
        batch = self._batch
        if batch is not None and batch.step == step:
            self._give_up(batch, now)

    def poll(self, now: float) -> None:
        batch = self._batch
        if batch is None or batch.future is None or not batch.future.done():
            return
        try:
            kept = batch.future.result()
        except Exception:  # a store counts what a disk does: this is a mistake, and costs a write
            logger.exception("writing to the %s tier failed", self._tiers.kind.name)
            kept = [False] * len(batch.entries)
        written = batch.entries[: len(kept)]
        if batch.is_wanted:
            self._tiers.wrote(batch.tokens, written, kept, batch.salt)
        else:
            self._tier_io.tell(self._tier_io.store.forget, [entry.key for entry in written])
        self._written |= {entry.key for entry in written}
        if all(kept):
            self._batch = None
        else:
            self._give_up(batch, now)

    def _give_up(self, batch: SpillBatch, now: float) -> None:
        self._batch = None
        self._not_before = now + PAUSE
        self._pass_on(batch.name)


MAX_BATCHES = 2  # on their way at a time, of all pushes
MAX_STATES = 8  # sent of a prompt, beside the one at its end


@dataclass(frozen=True)
class PushTarget:
    """What a decode engine asked for, and the way back to it."""

    wanted: Wanted
    peer: DecodePeer
    writer: Executor  # of its connection
    max_entry_bytes: int  # that it accepts


@dataclass
class PushStats:
    """Counters since start."""

    asked: int = 0  # prompts
    sent: int = 0  # whole
    refused: int = 0  # because the queue was full, for example
    failed: int = 0  # ended before all was sent: cancelled, disconnected, or an error
    sent_entries: int = 0
    sent_bytes: int = 0


class Push(Spills):
    """The tier that it writes to is the other engine."""

    def __init__(self, target: PushTarget, tiers: CacheTier, store: OutgoingStore) -> None:
        super().__init__(tiers, TierIO(store, writer=target.writer, reader=target.writer))
        self.target = target
        self.stats = tiers.stats
        # Once its request has ended: why not all of it was computed, or "".
        self.reason: str | None = None


@dataclass
class Pushes:
    memory: PrefixCache
    costs: Costs
    format: Format
    fingerprint: bytes
    batch_bytes: int
    # By `Submit.handover`; connections add to it.
    targets: dict[str, PushTarget] = field(default_factory=dict)
    stats: PushStats = field(default_factory=PushStats)
    # By request; the one that waited longest first.
    _pushes: dict[str, Push] = field(default_factory=dict)
    # In the order of their spills in a plan.
    _steps: dict[int, list[Push]] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return bool(self._pushes)

    @property
    def waits(self) -> bool:
        """Whether there may be something to be sent, and none of it is on its way."""
        return any(push.waits for push in self._pushes.values())

    @property
    def futures(self) -> list[Future[list[bool]]]:
        return [future for push in self._pushes.values() for future in push.futures]

    # ---- requests --------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """What memory has of its prompt already is sent at once."""
        target = self.targets.pop(request.handover)
        self.stats.asked += 1
        wanted = target.wanted
        store = OutgoingStore(wanted.id, target.peer, self.fingerprint)
        tiers = CacheTier(
            self.memory,
            store,
            self.costs.spec,
            self.format,
            canary=Canary("off"),
            batch_bytes=min(self.batch_bytes, target.max_entry_bytes),
            kind=OUTGOING,
            level=1,  # what was sent is not evicted any sooner
            wants_state=_states_of(len(wanted.tokens)),
        )
        tiers.expect(wanted.tokens, wanted.held, wanted.salt)
        push = self._pushes[request.id] = Push(target, tiers, store)
        push.note(request.id, wanted.tokens, wanted.salt)

    def refuse(self, handover: str, reason: str) -> None:
        target = self.targets.pop(handover)
        self.stats.refused += 1
        target.peer.end(target.wanted.id, reason)

    def note(self, request: Request, length: int) -> None:
        """Memory has so much of its prompt by now."""
        push = self._pushes.get(request.id)
        if push is not None:
            wanted = push.target.wanted
            push.note(request.id, wanted.tokens[:length], wanted.salt)

    def end(self, request: Request, reason: str) -> None:
        """It has ended. `reason`: why before all of its prompt was computed; "" if all was."""
        push = self._pushes.get(request.id)
        if push is None:
            return
        push.reason = reason
        if reason:
            push.forget()
        else:  # it may have been in memory whole, so that nothing was computed
            self.note(request, len(push.target.wanted.tokens))

    # ---- steps -----------------------------------------------------------------------------

    def plan(self, step: int, now: float) -> list[Spill]:
        """At most one batch of each, the one that waited longest first."""
        spills: list[Spill] = []
        for name, push in list(self._pushes.items()):
            push.poll(now)
            self._end_sent(name, push)
        num_batches = sum(push.writes for push in self._pushes.values())
        for name, push in list(self._pushes.items()):
            if num_batches >= MAX_BATCHES:
                break
            if push.writes:
                continue
            planned = push.plan(step, now)
            if planned:
                num_batches += 1
                spills += planned
                self._steps.setdefault(step, []).append(push)
                self._pushes[name] = self._pushes.pop(name)
            else:
                self._end_sent(name, push)
        return spills

    def commit(self, step: int, spilled: Iterator[Spilled], now: float) -> None:
        for push in self._steps.pop(step, []):
            push.commit(step, spilled, now)

    def fail_step(self, step: int, now: float) -> None:
        for push in self._steps.pop(step, []):
            push.fail_step(step, now)

    def forget(self) -> None:
        """What memory had was dropped."""
        for push in self._pushes.values():
            push.forget()

    def _end_sent(self, name: str, push: Push) -> None:
        if push.reason is None or push.hurry():
            return
        del self._pushes[name]
        stats, sent = self.stats, push.stats
        reason = push.reason or ("a part could not be sent" if sent.failed_spills else "")
        stats.sent += not reason
        stats.failed += bool(reason)
        stats.sent_entries += sent.spilled_entries
        stats.sent_bytes += sent.spilled_bytes
        push.target.peer.end(push.target.wanted.id, reason)


def _states_of(prompt_len: int) -> Callable[[Node], bool]:
    """That at its end restores a prompt; others, a part of it if the rest does not arrive.

    They are at multiples of `STATE_STRIDE`, so many apart that at most `MAX_STATES` are sent. The
    last one is among them: it is what --deterministic restores.
    """
    last = prompt_len // STATE_STRIDE
    apart = max(1, -(-last // MAX_STATES))

    def is_wanted(node: Node) -> bool:
        number, rest = divmod(node.end, STATE_STRIDE)
        return node.end == prompt_len or (not rest and (last - number) % apart == 0)

    return is_wanted
