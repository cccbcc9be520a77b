"""A request's life on the host, and what it has in a slot: bytes, locks, checkpoints."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pippin.cache.prefix_cache import Lock, PrefixCache
from pippin.decode.compile import Grammar
from pippin.messages import Submit, unpack_tokens
from pippin.types import FinishReason, Payload, TierName

FLUSH_SECONDS = 2.5  # to write what waits to be written, when the engine stops


@dataclass(frozen=True)
class Limits:
    max_running: int = 64
    max_running_reason: str = ""  # why so many, for /status
    max_queue: int = 1024
    max_queue_tokens: int = 1 << 40
    prefill_tokens: int = 512
    max_gap: float = math.inf  # seconds that a step with running streams may be planned to take
    for_streams: bool = True  # replies are read while they grow: prompts leave them time
    deterministic: bool = False  # only whole grid blocks of prompts are computed alike and shared
    forced_chunks: bool = True  # several tokens that a grammar forces may run at once
    capacity_bytes: int = 1 << 40


KEY_TOKENS = 16  # prompts that share less than this are strangers

Phase = Literal[
    "compiling",  # not in the queue yet: what it is to obey is being compiled
    "waiting",  # in the queue, no slot
    "loading",  # not in the queue: a part of its prompt is being loaded from a tier below
    "prefill",  # chunks of what is known are being planned
    "decode",  # one token a step
    "ended",  # it has its terminal message
]


#   tokens:  [ prompt | reply: sampled or forced, known | sampled, in flight ]
#            0   prompt_len                        num_tokens
class Request:
    def __init__(
        self,
        submit: Submit,
        *,
        seed: int,
        arrival: int,
        arrived_at: int = 0,
        grammar: Grammar | None = None,
    ) -> None:
        prompt = unpack_tokens(submit.tokens)
        self.id = submit.id
        self.prompt = prompt  # int32 [prompt_len]
        self.params = submit.params
        self.stop_ids = frozenset(submit.stop_ids)
        self.boundaries = tuple(submit.boundaries)
        self.seed = seed
        self.arrival = arrival  # counts requests: in order of arrival
        self.arrived_at = arrived_at  # counts prompt tokens that had been planned by then
        # Of its salt and first tokens: prompts that begin alike have the same; b"": too short.
        self.key = submit.salt + prompt[:KEY_TOKENS].tobytes() if len(prompt) > KEY_TOKENS else b""
        self.salt = submit.salt  # a digest: requests of another salt share nothing with it
        self.priority = submit.priority  # higher starts first, and is preempted last
        self.grammar = grammar
        self.prediction = unpack_tokens(submit.prediction)  # what its client expects as the reply
        self.embeds = submit.embeds  # it wants the hidden vector after its prompt, and no reply
        self.handover = submit.handover  # a decode engine's, which its prompt is computed for

        self.phase: Phase = "waiting"
        self.output: list[int] = []
        self.num_sampled = 0  # tokens of the reply that are known or in flight
        self.finish: FinishReason | None = None
        self.slot = 0  # while it runs; what comes with it is a `RunningSlot`
        self.cached_len = 0  # prompt tokens that were not computed, when it first started
        self.host_len = 0  # of these, loaded for it from the host's memory
        self.disk_len = 0  # and from disk
        self.peer_len = 0  # and from a prefill engine
        # int32 [words]: of its next token, where its grammar is slow
        self.mask: np.ndarray | None = None
        self.followed = False  # a thread makes that mask
        self.was_wanted = False  # a prefill engine was asked for its prompt: once
        self.tiers_tried = 0  # in so many tiers below memory, since it was queued
        # Tokens [start, end) that were loaded for it, from each tier.
        self.loaded: dict[TierName, tuple[int, int]] = {}
        self.accepted_drafts = 0  # that were verified for it,
        self.rejected_drafts = 0  # and were wrong
        self.num_preemptions = 0
        self.starts_again = False  # what it was restored from the first time was damaged
        self.submitted_s: float | None = None  # on the loop's clock
        self.queued_s: float | None = None  # how long it waited, when it first started
        self.passed_over = 0  # times a later request was started first
        self.promise: Promise | None = None  # while it waits by choice for a prefix

    # ---- what is known ---------------------------------------------------------------------

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the committed reply."""
        return len(self.prompt) + len(self.output)

    @property
    def num_queued(self) -> int:
        """Tokens that it holds in the host's memory while it waits."""
        return self.num_tokens + len(self.prediction)

    @property
    def max_total(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    @property
    def running(self) -> bool:
        return self.phase in ("prefill", "decode")

    @property
    def completed(self) -> bool:
        """Ended in earnest: all of its reply is worth keeping."""
        return self.finish in ("stop", "length")

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Every position of the prompt is to be scored: none may come from the cache."""
        return self.params.prompt_logprobs is not None and not self.output

    @property
    def runs_ahead(self) -> bool:
        """Tokens that its grammar forces are known before they are drawn: no scores are wanted."""
        return self.params.logprobs is None and self.params.prompt_logprobs is None

    @property
    def waits_for_mask(self) -> bool:
        """Its grammar is slow, and what its next token may be is not known yet: no row of it."""
        if self.grammar is None:
            return False
        return self.followed or (self.grammar.slow and self.num_sampled > len(self.output))

    @property
    def in_flight(self) -> bool:
        """Beside the sample that is being committed another one is planned."""
        return self.num_sampled > len(self.output) + 1

    def waits_for(self, running: RunningSlot) -> bool:
        return self.promise is not None and self.promise.running is running

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts by seniority: the highest priority first, then the earliest arrival."""
        return -self.priority, self.arrival

    def tokens(self, length: int) -> np.ndarray:
        """The first `length` known tokens, int32."""
        if length <= len(self.prompt):
            return self.prompt[:length]
        reply = np.asarray(self.output[: length - len(self.prompt)], dtype=np.int32)
        return np.concatenate([self.prompt, reply])

    # ---- transitions -----------------------------------------------------------------------

    def token(self, position: int) -> int:
        """The known token at a position of the reply."""
        return self.output[position - len(self.prompt)]

    def start(self, slot: int, cached_len: int) -> None:
        assert self.phase == "waiting"
        self.phase = "prefill"
        self.slot = slot
        if not self.num_preemptions:
            self.cached_len = cached_len
            self.peer_len = self._num_loaded("peer", cached_len)
            cached_len -= self.peer_len
            self.disk_len = self._num_loaded("disk", cached_len)
            self.host_len = self._num_loaded("host", cached_len - self.disk_len)

    def _num_loaded(self, tier: TierName, length: int) -> int:
        """Of the first `length` tokens: what a tier brought lies before what a slower one did."""
        start, end = self.loaded.get(tier, (0, 0))
        return max(0, min(length, end) - start)

    def plan_sample(self, end: int) -> None:
        """What comes before `end` has been planned, and with it the token there: known or not."""
        self.phase = "decode"
        self.num_sampled = max(self.num_sampled, end - len(self.prompt) + 1)

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled or forced token; why it ends the reply, None if it does not."""
        self.output.append(token)
        num_generated = len(self.output)
        self.num_sampled = max(self.num_sampled, num_generated)
        if token in self.stop_ids and num_generated > self.params.min_tokens:
            return "stop"
        return "length" if num_generated >= self.params.max_tokens else None

    def requeue(self, *, damaged: bool) -> None:
        """No sample is in flight, and what is known stays known. `damaged`: what it was restored
        from. A reply without tokens then starts again, as if it had never started."""
        assert self.running
        self.phase = "waiting"
        self.slot = self.tiers_tried = 0
        if damaged and not self.output:
            self.starts_again = True
            self.num_sampled = self.cached_len = 0
            self.host_len = self.disk_len = self.peer_len = 0
        else:
            assert self.num_sampled == len(self.output), "a sample is in flight"
            self.num_preemptions += 1

    def end(self, reason: FinishReason) -> None:
        assert self.finish is None, f"{self.id} has ended"
        self.phase = "ended"
        self.finish = reason


class SlotPool:
    """The lowest free slot is acquired first, so that rows stay dense. Row 0 is padding."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))

    def acquire(self) -> int:
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        assert slot not in self._free
        heapq.heappush(self._free, slot)

    @property
    def num_free(self) -> int:
        return len(self._free)


@dataclass
class ByteBudget:
    """`capacity` is what the weights and the work space leave."""

    capacity: int
    cache: PrefixCache | None
    claimed: int = 0

    @property
    def available(self) -> int:
        """The largest claim that would be met now."""
        left = self.capacity - self.claimed
        return left if self.cache is None else left - self.cache.nbytes + self.cache.evictable_bytes

    @property
    def free(self) -> int:
        return self.capacity - self.claimed - (0 if self.cache is None else self.cache.nbytes)

    def claim(self, nbytes: int) -> bool:
        """Take `nbytes`, evicting from the tree if need be; or refuse, without any effect."""
        if nbytes > self.available:
            return False
        self._set_claimed(self.claimed + nbytes)
        return True

    def claim_free(self, nbytes: int) -> bool:
        """Take `nbytes` of what is free, or refuse: the tree keeps what it has."""
        return nbytes <= self.free and self.claim(nbytes)

    def release(self, nbytes: int) -> None:
        assert 0 <= nbytes <= self.claimed
        self._set_claimed(self.claimed - nbytes)

    def _set_claimed(self, nbytes: int) -> None:
        if nbytes == self.claimed:
            return
        self.claimed = nbytes
        if self.cache is not None:
            self.cache.set_capacity(self.capacity - nbytes)


class Stage(enum.IntEnum):
    """One may be skipped and none repeated, but that a step that was to retire it may fail."""

    RUNNING = 0  # rows of it are planned
    CLOSED = 1  # no bytes for the last token of its reply: no more rows
    PREEMPTING = 2  # no more rows; its request is queued again once it is fenced
    RETIRING = 3  # a step that retires it is in flight
    RELEASED = 4  # the row is gone from the device


class Quality(enum.IntEnum):
    """Of what the row holds. It only gets worse."""

    DAMAGED = 0  # restored from a payload that had changed: tainted, and its request runs again
    TAINTED = 1  # a step of this slot failed: what the row holds is not known
    DETACHED = 2  # sound, but what would connect its chunks to the tree was evicted
    SOUND = 3


@dataclass(frozen=True)
class Promise:
    running: RunningSlot
    shared: int  # tokens that it brings to a request that waits,
    inflight_len: int  # of so many in all


#   positions:  [ restored | computed here, planned | drafts in flight ]   `row_len` counts them all
#               0      start_len            row_len - num_unsure    row_len
#   `in_tree` of them were given to the tree; chunks end at `prefill_len`, then tokens follow.
@dataclass(eq=False, slots=True)
class RunningSlot:
    request: Request
    slot: int
    prefill_len: int  # tokens known when it started: chunks run these
    nbytes: int  # claimed for the row
    row_tokens: int  # the row may grow to this many tokens within `nbytes`
    lock: Lock | None = None  # on what it was restored from
    tip: Lock | None = None  # on the end of what it has put into the tree
    start_len: int = 0  # restored from the tree
    capture_len: int = 0  # what it restored and its chunks bring the tree: tokens [0, n)
    keeps_reply: bool = True  # a copy of what it holds goes to the tree when its reply has ended
    branch: int = 0  # where the request's tokens leave a path that is already in the tree
    row_len: int = 0  # at most, while drafts are in flight
    drafted_len: int = 0  # its KV was written up to here, rejected drafts included
    num_unsure: int = 0  # drafts in flight: each may be rejected, and is then not part of the row
    num_extra: int = 0  # drafts that the last committed step accepted: the row can do without these
    num_drafts: int = 0  # that the device's drafter leaves for the next step
    checkpoint_len: int = 0  # a checkpoint of the reply was planned for this length, or nearby
    in_tree: int = 0
    last_step: int = -1  # the last plan with a row of this slot: its fence
    stage: Stage = Stage.RUNNING
    quality: Quality = Quality.SOUND
    captured_len: int = 0  # tokens that the tree gets with the step that retires it
    # States of the reply, by position. The tree takes them when it gets the KV they belong to.
    checkpoints: dict[int, Payload] = field(default_factory=dict)
    # Requests that wait for its prompt, by what is shared with each. Ended waits are dropped when
    # they are met.
    waiters: list[tuple[int, int, Request]] = field(default_factory=list)
    num_skipped: int = 0  # steps in a row that computed prompts, and nothing of this one

    def __post_init__(self) -> None:
        self.row_len = self.in_tree = self.start_len

    @property
    def runs(self) -> bool:
        """Whether its request is running, and in this slot."""
        return self.request.running and self.request.slot == self.slot

    @property
    def preempting(self) -> bool:
        return self.stage is Stage.PREEMPTING

    @property
    def tainted(self) -> bool:
        return self.quality <= Quality.TAINTED

    @property
    def priority(self) -> int:
        """Of its request, or of one that waits for what it computes if that is higher."""
        own = self.request.priority
        if not self.waiters:
            return own
        return max([own, *(r.priority for *_, r in self.waiters if r.waits_for(self))])

    @property
    def num_left(self) -> int:
        """Known tokens that are still to be run before the next one can be sampled."""
        return self.prefill_len - self.row_len

    @property
    def num_known(self) -> int:
        """Known tokens that no step runs yet: none or one, unless a grammar forces more."""
        return self.request.num_tokens - self.row_len

    @property
    def kept_len(self) -> int:
        """Known tokens that the row holds; drafts that were accepted after the reply's end are not
        among them."""
        return min(self.row_len, self.request.num_tokens)

    @property
    def is_exact(self) -> bool:
        """Whether the row holds known tokens and nothing else, or can do without the rest."""
        return not self.tainted and self.row_len - self.request.num_tokens <= self.num_extra

    @property
    def inflight_len(self) -> int:
        """Tokens [0, n) that the tree will hold if all goes on as it is planned now."""
        request = self.request
        if self.tainted:
            return 0
        if self.stage in (Stage.RETIRING, Stage.RELEASED):
            return self.captured_len
        if request.completed and self.keeps_reply:
            return request.num_tokens
        return self.capture_len if self.quality is Quality.SOUND and self.runs else 0

    @property
    def checkpoint_bytes(self) -> int:
        return sum(state.nbytes for state in self.checkpoints.values())

    @property
    def freed_bytes(self) -> int:
        """What its end gives back."""
        return self.nbytes + self.checkpoint_bytes

    # ---- transitions -----------------------------------------------------------------------

    def enter(self, stage: Stage) -> None:
        again = stage is self.stage is Stage.RETIRING
        assert stage > self.stage or again, f"slot {self.slot}: {self.stage.name} to {stage.name}"
        self.stage = stage

    def worsen(self, quality: Quality) -> None:
        self.quality = min(self.quality, quality)

    def plan_row(self, step: int, end: int, *, samples: bool, depth: int = 0) -> None:
        """The next step runs tokens up to `end`, and samples the one there or not.

        Of a reply's the last may be unknown, and `depth` drafts behind it may be rejected. A reply
        that has ended samples what is known of it.
        """
        assert self.stage is Stage.RUNNING
        self.row_len = end
        self.last_step = step
        self.num_unsure += depth
        if samples and self.request.running:
            self.request.plan_sample(end)

    def settle(self, depth: int, accepted: int) -> None:
        assert 0 <= accepted <= depth
        self.num_unsure -= depth
        self.num_extra = accepted
        self.drafted_len = max(self.drafted_len, self.row_len)
        self.row_len -= depth - accepted
        if self.runs:
            self.request.num_sampled -= depth - accepted

    def retire(self, captured_len: int) -> None:
        """A step that retires it was planned; it brings the tree so many tokens."""
        self.enter(Stage.RETIRING)
        self.captured_len = captured_len

    def lost_tree(self, position: int) -> None:
        """The tree holds only `position` of the tokens that were given to it."""
        self.in_tree = min(self.in_tree, position)
        self.worsen(Quality.DETACHED)

    def unlock_tip(self, cache: PrefixCache | None) -> None:
        if cache is not None and self.tip is not None:
            cache.unlock(self.tip)
            self.tip = None

    def unlock(self, cache: PrefixCache | None) -> None:
        """Depend on nothing in the tree any more."""
        self.unlock_tip(cache)
        if cache is not None and self.lock is not None:
            cache.unlock(self.lock)
            self.lock = None

    def keep_checkpoints(self, states: Mapping[int, Payload], budget: ByteBudget) -> None:
        """Keep states of the reply, as far as free bytes reach; the others are released."""
        for position, state in states.items():
            if position not in self.checkpoints and budget.claim_free(state.nbytes):
                self.checkpoints[position] = state
            else:
                state.release()

    def take_checkpoints(self, positions: Iterable[int], budget: ByteBudget) -> dict[int, Payload]:
        """Remove and return these, with their claim released."""
        taken = {position: self.checkpoints.pop(position) for position in positions}
        budget.release(sum(state.nbytes for state in taken.values()))
        return taken

    def drop_checkpoints(self, positions: Iterable[int], budget: ByteBudget) -> None:
        for state in self.take_checkpoints(positions, budget).values():
            state.release()

    def release(self, budget: ByteBudget, slots: SlotPool, cache: PrefixCache | None) -> None:
        """Release everything: the row is gone from the device."""
        self.enter(Stage.RELEASED)
        self.unlock(cache)
        self.drop_checkpoints(list(self.checkpoints), budget)
        budget.release(self.nbytes)
        slots.release(self.slot)
