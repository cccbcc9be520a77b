"""Prompts that decode engines asked for: sent chunk by chunk while they are computed. Knows no
arrays and no sockets.

Each has a tree of what its decode engine has, and spills of its own: what is missing there is the
difference to memory, as it is of a disk. It ends when its request has ended and all was sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from pippin.backends.base import Costs, Spill, Spilled
from pippin.cache.peers.outgoing_store import OutgoingStore
from pippin.cache.peers.wanted import DecodePeer, Wanted
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.diff import STATE_STRIDE
from pippin.cache.tiers.kinds import OUTGOING
from pippin.cache.tiers.tier_io import TierIO
from pippin.cache.tiers.tier_tree import Format
from pippin.cache.tree.canary import Canary
from pippin.cache.tree.radix import Node
from pippin.scheduler.request import Request
from pippin.scheduler.traffic.spills import Spills

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


@dataclass(eq=False)
class Push:
    target: PushTarget
    tiers: CacheTier
    spills: Spills
    reason: str | None = None  # once its request has ended: why not all of it was computed, or ""


class Pushes:
    def __init__(
        self,
        memory: PrefixCache,
        costs: Costs,
        format: Format,
        *,
        fingerprint: bytes,
        batch_bytes: int,
    ) -> None:
        self._memory = memory
        self._costs = costs
        self._format = format
        self._fingerprint = fingerprint
        self._batch_bytes = batch_bytes
        self.targets: dict[str, PushTarget] = {}  # by `Submit.handover`; connections add to it
        self._pushes: dict[str, Push] = {}  # by request; the one that waited longest first
        self._steps: dict[int, list[Push]] = {}  # in the order of their spills in a plan
        self.stats = PushStats()

    @property
    def busy(self) -> bool:
        return bool(self._pushes)

    @property
    def waits(self) -> bool:
        """Whether there may be something to be sent, and none of it is on its way."""
        return any(push.spills.waits for push in self._pushes.values())

    @property
    def futures(self) -> list[Future[list[bool]]]:
        return [future for push in self._pushes.values() for future in push.spills.futures]

    # ---- requests --------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """What memory has of its prompt already is sent at once."""
        target = self.targets.pop(request.handover)
        self.stats.asked += 1
        wanted = target.wanted
        store = OutgoingStore(wanted.id, target.peer, self._fingerprint)
        tiers = CacheTier(
            self._memory,
            store,
            self._costs.spec,
            self._format,
            canary=Canary("off"),
            batch_bytes=min(self._batch_bytes, target.max_entry_bytes),
            kind=OUTGOING,
            level=1,  # what was sent is not evicted any sooner
            wants_state=_states_of(len(wanted.tokens)),
        )
        tiers.expect(wanted.tokens, wanted.held, wanted.salt)
        tier_io = TierIO(store, writer=target.writer, reader=target.writer)
        push = self._pushes[request.id] = Push(target, tiers, Spills(tiers, tier_io))
        push.spills.note(request.id, wanted.tokens, wanted.salt)

    def refuse(self, handover: str, reason: str) -> None:
        target = self.targets.pop(handover)
        self.stats.refused += 1
        target.peer.end(target.wanted.id, reason)

    def note(self, request: Request, length: int) -> None:
        """Memory has so much of its prompt by now."""
        push = self._pushes.get(request.id)
        if push is not None:
            wanted = push.target.wanted
            push.spills.note(request.id, wanted.tokens[:length], wanted.salt)

    def end(self, request: Request, reason: str) -> None:
        """It has ended. `reason`: why before all of its prompt was computed; "" if all was."""
        push = self._pushes.get(request.id)
        if push is not None:
            push.reason = reason
            if reason:
                push.spills.forget()
            else:  # it may have been in memory whole, so that nothing was computed
                wanted = push.target.wanted
                push.spills.note(request.id, wanted.tokens, wanted.salt)

    # ---- steps -----------------------------------------------------------------------------

    def plan(self, step: int, now: float) -> list[Spill]:
        """At most one batch of each, the one that waited longest first."""
        spills: list[Spill] = []
        for name, push in list(self._pushes.items()):
            push.spills.poll(now)
            self._end_sent(name, push)
        num_batches = sum(push.spills.writes for push in self._pushes.values())
        for name, push in list(self._pushes.items()):
            if num_batches >= MAX_BATCHES:
                break
            if push.spills.writes:
                continue
            planned = push.spills.plan(step, now)
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
            push.spills.commit(step, spilled, now)

    def fail_step(self, step: int, now: float) -> None:
        for push in self._steps.pop(step, []):
            push.spills.fail_step(step, now)

    def forget(self) -> None:
        """What memory had was dropped."""
        for push in self._pushes.values():
            push.spills.forget()

    def _end_sent(self, name: str, push: Push) -> None:
        if push.reason is None or push.spills.hurry():
            return
        del self._pushes[name]
        stats, sent = self.stats, push.tiers.stats
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
