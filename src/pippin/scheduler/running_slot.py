"""What a request has while it is in a slot: bytes, locks, checkpoints. Knows no arrays.

A request that is preempted and resumed gets another `RunningSlot`, in another slot, so that what
still arrives for the first can not be taken for the second's.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.results import Lock
from pippin.scheduler.memory.byte_budget import ByteBudget
from pippin.scheduler.request import Request
from pippin.scheduler.slot_pool import SlotPool
from pippin.types import Payload


class Stage(enum.Enum):
    RUNNING = "rows of it are planned"
    CLOSED = "no bytes for the last token of its reply: no more rows"
    PREEMPTING = "no more rows; its request is queued again once it is fenced"
    RETIRING = "a step that retires it is in flight"
    RELEASED = "the row is gone from the device"


#   RUNNING ─▶ CLOSED ─▶ PREEMPTING ─▶ RETIRING ─▶ RELEASED      one may be skipped, none repeated;
#                                        └─▶ RETIRING            but a step that failed is
NEXT_STAGES = {
    Stage.RUNNING: (Stage.CLOSED, Stage.PREEMPTING, Stage.RETIRING),
    Stage.CLOSED: (Stage.PREEMPTING, Stage.RETIRING),
    Stage.PREEMPTING: (Stage.RETIRING,),
    Stage.RETIRING: (Stage.RETIRING, Stage.RELEASED),
    Stage.RELEASED: (),
}


class Quality(enum.IntEnum):
    """Of what the row holds. It only gets worse."""

    DAMAGED = 0  # restored from a payload that had changed: tainted, and its request runs again
    TAINTED = 1  # a step of this slot failed: what the row holds is not known
    DETACHED = 2  # sound, but what would connect its chunks to the tree was evicted
    SOUND = 3


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
    inherited: int | None = None  # the highest priority of requests that wait for its prompt
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
    def released(self) -> bool:
        return self.stage is Stage.RELEASED

    @property
    def tainted(self) -> bool:
        return self.quality <= Quality.TAINTED

    @property
    def damaged(self) -> bool:
        return self.quality is Quality.DAMAGED

    @property
    def priority(self) -> int:
        """Of its request, or of one that waits for what it computes if that is higher."""
        own = self.request.priority
        return own if self.inherited is None else max(own, self.inherited)

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

    # ---- transitions -----------------------------------------------------------------------

    def enter(self, stage: Stage) -> None:
        assert stage in NEXT_STAGES[self.stage], f"slot {self.slot}: {self.stage} to {stage}"
        self.stage = stage

    def worsen(self, quality: Quality) -> None:
        self.quality = min(self.quality, quality)

    def inherit(self, priority: int) -> None:
        """A request of this priority waits for its prompt."""
        self.inherited = priority if self.inherited is None else max(self.inherited, priority)

    def plan_chunk(self, step: int, end: int) -> None:
        """The next step runs what is known up to `end`, and samples if that is all of it."""
        assert end > self.row_len or end == self.prefill_len
        self._advance(step, end)
        if end == self.prefill_len:
            self.request.plan_sample(end)

    def plan_tokens(self, step: int, end: int, *, samples: bool, depth: int = 0) -> None:
        """The next step runs the reply up to `end`, and samples the token there or not.

        Of these the last may be unknown, and `depth` drafts behind it may be rejected. A reply that
        has ended samples what is known of it.
        """
        self._advance(step, end)
        self.num_unsure += depth
        if samples and self.request.running:
            self.request.plan_sample(end)

    def settle(self, depth: int, accepted: int) -> None:
        """A step of this slot was committed that had `depth` drafts."""
        assert 0 <= accepted <= depth
        self.num_unsure -= depth
        self.num_extra = accepted
        self.row_len -= depth - accepted
        if self.runs:
            self.request.num_sampled -= depth - accepted

    def _advance(self, step: int, end: int) -> None:
        assert self.stage is Stage.RUNNING
        self.row_len = end
        self.last_step = step

    def retire(self, captured_len: int) -> None:
        """A step that retires it was planned; it brings the tree so many tokens."""
        self.enter(Stage.RETIRING)
        self.captured_len = captured_len

    def entered_tree(self, position: int) -> None:
        self.in_tree = max(self.in_tree, position)

    def lost_tree(self, position: int) -> None:
        """The tree holds only `position` of the tokens that were given to it."""
        self.in_tree = min(self.in_tree, position)
        self.worsen(Quality.DETACHED)

    def move_tip(self, cache: PrefixCache, tip: Lock) -> None:
        """Lock the end of what was just inserted, so that the next chunk connects to it."""
        if self.tip is not None:
            cache.unlock(self.tip)
        self.tip = tip

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
