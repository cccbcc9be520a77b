"""What watchers are told, as JSON: docs/feed.md in types. Knows nothing of where it comes from.

    snapshot   everything, to whoever has just come or fell behind
    frame      what is new since the message before
    engine     the engine was lost: the next message is another one's snapshot

Times are seconds on the engine's own clock, which began with `Snapshot.began`. No text, and no
token: numbers alone.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pippin.types import FinishReason, StepForwards

Phase = Literal["compiling", "waiting", "loading", "prefill", "decode", "ended"]
Change = Literal["add", "split", "change", "show"]


class StepChunk(msgspec.Struct, frozen=True, gc=False):
    """A piece of a prompt in a step, or of a reply that a grammar forces: [start, start + tokens).

    Before it `restored` tokens came out of the tree; where all did, the chunk has 0 tokens.
    """

    request: str
    slot: int
    start: int
    tokens: int
    restored: int  # with the first chunk of a request
    samples: bool  # it ends what is known: the request's next token is sampled
    checkpoints: int  # states that are captured along it


class Step(msgspec.Struct, frozen=True, gc=False):
    """One step, once it is committed.

    planned ───── dispatched ── launched      resumed - waited ─── resumed ──── committed
      host plans, builds, hands over            host waits           host commits
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
    decode: list[int]  # slots that ran one token
    ghosts: int  # of all rows: their requests had ended, what they sampled was dropped
    started: list[str]  # requests that got a slot
    retracted: list[str]  # requests that went back to the queue
    retired: list[int]  # slots that were given back
    captures: int  # chunks, rows and ends whose KV or state goes into the tree, or is kept for it
    loads: int  # payloads that came from a tier below
    spills: int  # payloads whose bytes went there
    forwards: StepForwards


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request, in the phase that it is in now."""

    id: str
    phase: Phase
    slot: int | None  # that it runs in, or ran in
    prompt: int  # tokens
    cached: int  # of these, not computed
    disk: int  # of these, read from disk for it
    held: int  # tokens of prompt and reply that its row holds
    reply: int  # tokens so far
    max_tokens: int
    priority: int
    retractions: int
    came: float
    started: float | None  # its first step was planned
    first_token: float | None
    ended: float | None
    finish: FinishReason | None
    host: int = 0  # of `cached`, loaded for it from the host's memory


class Progress(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How far a running request is: [slot, held, reply]."""

    slot: int
    held: int
    reply: int


class Node(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + tokens) of every sequence through here, and what is kept of them."""

    id: int  # as long as it lives; a split gives the upper part a new one
    parent: int  # 0 is the root, which has no tokens and is never told
    start: int
    tokens: int
    children: int  # also those that are not told
    bytes: dict[str, int]  # by component; one that is missing is not valid here
    tier: Literal["device", "host", "disk"]  # not the device: all of them are there, too
    hits: int  # prompts whose match ended here
    used: int  # `Tree.tick` of its last use
    change: Change  # why it is told: new, the upper part of one that was split, ...


class Tree(msgspec.Struct, frozen=True, gc=False):
    """Nodes that are new or have changed, parents first, and the ids of those to forget.

    In a snapshot all that are told; at most MAX_NODES at a time, those used last.
    """

    nodes: list[Node]
    evicted: list[int]  # no longer in the tree
    hidden: list[int]  # in the tree, but no longer told
    used: list[int]  # paths that end there were used, in this order
    locked: list[int]  # paths that end there are held by a running request: all of these
    tick: int  # counts uses
    num_nodes: int  # of the whole tree
    num_tokens: int
    num_roots: int  # children of the root


class Memory(msgspec.Struct, frozen=True, gc=False):
    """Bytes: capacity = rows + checkpoints + captures + loads + the tree's components + free."""

    device: int  # all that the device holds, weights included
    capacity: int  # of the budget, what weights and work space leave
    rows: int  # claimed by running requests
    checkpoints: int  # states of replies that the tree has not got yet
    captures: int  # of steps in flight
    loads: int  # on their way from a tier below
    tree: dict[str, int]  # by component
    evictable: int  # of the tree, what no running request holds
    free: int


class EngineLoad(msgspec.Struct, frozen=True, gc=False):
    """How busy it is. Tokens and ends are counted since the engine's start."""

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
    retractions: int
    tokens_per_second: float  # generated in the steps of this message
    idle_share: float | None  # of the device, over the steps of this message; None: of too few


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    began: float  # Unix time at 0 s of the engine's clock
    at: float
    number: int  # of the last frame that is part of it
    device: str
    slots: int
    overlap: bool
    components: list[str]
    steps: list[Step]  # the last ones that were told
    requests: list[Request]  # those that have not ended, and the last that have
    tree: Tree | None  # None: there is no prefix cache
    memory: Memory
    load: EngineLoad


class Frame(msgspec.Struct, frozen=True, gc=False):
    at: float
    number: int  # counts frames: the last one's and 1
    steps: list[Step]
    left_out: int  # steps that were too many for one message: the oldest
    requests: list[Request]  # those whose phase has changed
    progress: list[Progress]  # of all that run
    tree: Tree | None  # None: nothing changed there
    memory: Memory
    load: EngineLoad


class EngineLost(msgspec.Struct, frozen=True, gc=False):
    reason: str
