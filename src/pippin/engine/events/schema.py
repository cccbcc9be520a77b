"""The events of an engine as JSON, as docs/internals/events.md has them.

    snapshot   everything, to a watcher that is new or fell behind
    frame      what is new since the message before
    engine     the engine was lost: the next message is another one's snapshot

Times are seconds on the engine's own clock, which starts at `Snapshot.began`. Numbers only: no text
and no tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pippin.types import FinishReason, StepForwards

Phase = Literal["compiling", "waiting", "loading", "prefill", "decode", "ended"]
Change = Literal["add", "split", "change", "show"]


class StepChunk(msgspec.Struct, frozen=True, gc=False):
    """A piece of a prompt in a step, or of a reply that a grammar forces: [start, start + tokens).

    `restored` tokens before it are copied from the tree; where all are, the chunk has 0 tokens.
    """

    request: str
    slot: int
    start: int
    tokens: int
    restored: int  # with the first chunk of a request
    samples: bool  # it ends what is known: the request's next token is sampled
    checkpoints: int  # states that are captured along it


class StepEvent(msgspec.Struct, frozen=True, gc=False):
    """One step, once it is committed.

    planned ───── dispatched ── launched      resumed - waited ─── resumed ──── committed
      host plans, builds, launches              host waits           host commits
                      └─────── device: from here, or from the end of the step before ─ done ┘
    """

    step: int
    planned: float
    dispatched: float
    launched: float
    done: float  # the device's end of it: seen if `seen`, else at the earliest
    resumed: float
    committed: float
    waited: float
    seen: bool
    after_pause: bool  # the engine had nothing to do before it
    idle: float | None  # seconds of `span` in which the device had nothing to do, at most
    span: float | None  # from the end of the step before on the device; None after a pause
    chunks: list[StepChunk]
    decode: list[int]  # slots that ran one token, and drafts behind it
    drafts: list[tuple[int, int, int]]  # of these, slots with drafts: verified, and accepted
    ghosts: int  # of all rows: their requests had ended, what they sampled was dropped
    started: list[str]  # requests that got a slot
    preempted: list[str]  # requests that are back in the queue
    retired: list[int]  # slots that were freed
    captures: int  # chunks, rows and ends whose KV or state the tree gets, or that are kept for it
    loads: int  # payloads that arrived from a tier below
    spills: int  # payloads that were written there
    forwards: StepForwards


class RequestEvent(msgspec.Struct, frozen=True, gc=False):
    """One request, in the phase that it is in now."""

    id: str
    phase: Phase
    slot: int | None  # that it runs in, or ran in
    prompt: int  # tokens
    cached: int  # of these, not computed
    disk: int  # of these, read from disk for it
    held: int  # tokens of prompt and reply in its row
    reply: int  # tokens so far
    max_tokens: int
    priority: int
    preemptions: int
    arrived: float
    started: float | None  # its first step was planned
    first_token: float | None
    ended: float | None
    finish: FinishReason | None
    host: int = 0  # of `cached`, loaded for it from the host's memory
    peer: int = 0  # of `cached`, computed by a prefill engine


class SlotProgress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a running request is: [slot, held, reply]."""

    slot: int
    held: int
    reply: int


class NodeEvent(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + tokens) of every sequence through it, and what is cached of them."""

    id: int  # as long as it lives; a split gives the upper part a new one
    parent: int  # 0 is the root, which has no tokens and is never sent
    start: int
    tokens: int
    children: int  # also those that are not sent
    bytes: dict[str, int]  # by component; one that is missing is not valid here
    tier: Literal["device", "host", "disk"]  # not the device: that tier has a copy of all
    hits: int  # prompts whose match ended here
    used: int  # `Tree.tick` of its last use
    change: Change  # why it is sent: new, the upper part of one that was split, ...


class TreeEvent(msgspec.Struct, frozen=True, gc=False):
    """Nodes that are new or have changed, parents first, and the ids of those to remove.

    At most MAX_NODES are known to watchers at a time, those used last; a snapshot has all of them.
    """

    nodes: list[NodeEvent]
    evicted: list[int]  # no longer in the tree
    hidden: list[int]  # in the tree, but no longer sent
    used: list[int]  # paths that end there were used, in this order
    locked: list[int]  # every path that a running request locks, by its end
    tick: int  # counts uses
    num_nodes: int  # of the whole tree
    num_tokens: int
    num_roots: int  # children of the root


class MemoryUse(msgspec.Struct, frozen=True, gc=False):
    """Bytes: capacity = rows + checkpoints + captures + loads + the tree's components + free."""

    device: int  # everything on the device, weights included
    capacity: int  # of the budget, what weights and work space leave
    rows: int  # claimed by running requests
    checkpoints: int  # states of replies that are not in the tree yet
    captures: int  # of steps in flight
    loads: int  # on their way from a tier below
    tree: dict[str, int]  # by component
    evictable: int  # of the tree, what no running request locks
    free: int


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """How busy it is. Tokens and finished requests are counted since the engine's start."""

    running: int
    waiting: int  # in the queue
    compiling: int  # a grammar of theirs
    loading: int  # a part of their prompt, from a tier below
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    finished: int
    aborted: int
    failed: int
    preemptions: int
    tokens_per_second: float  # generated in the steps of this message
    idle_share: float | None  # of the device, over the steps of this message; None: of too few
    received: int | None = None  # whole prompts of prefill engines; None: it asks none
    sent: int | None = None  # whole prompts to decode engines; None: none can ask it


class _Message(msgspec.Struct, frozen=True, gc=False):
    at: float
    number: int  # counts frames; of a snapshot, the last frame that is part of it
    steps: list[StepEvent]  # new ones; in a snapshot the last ones
    requests: list[RequestEvent]  # in another phase; in a snapshot the open and the last ended ones
    tree: TreeEvent | None  # None: no change; in a snapshot, no prefix cache
    memory: MemoryUse
    load: EngineLoad


class Snapshot(_Message, frozen=True, gc=False):
    began: float  # Unix time at 0 s of the engine's clock
    device: str
    slots: int
    overlap: bool
    components: list[str]


class Frame(_Message, frozen=True, gc=False):
    left_out: int  # steps that were too many for one message: the oldest
    progress: list[SlotProgress]  # of all that run


class EngineLost(msgspec.Struct, frozen=True, gc=False):
    reason: str
