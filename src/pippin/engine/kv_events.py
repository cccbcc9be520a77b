"""KV events: which blocks of tokens an engine can restore, published for routers.

    engine's thread    trees ── observers mark nodes ──▶ `collect`, after each step ──▶ listeners
    thread of its own  queue ──▶ EventForm ──▶ EventPublisher, and requests for past batches

A block is BLOCK_TOKENS tokens from a multiple of BLOCK_TOKENS on; its digest covers all tokens
before it too. Each is hashed once, and kept by the node in which it ends (`Node.blocks`). There are
two groups of blocks:

    KV      blocks at or before a point where a prompt can be restored: without gaps from the root
    ENDS    of a model that restores at checkpoints or behind whole windows only: blocks at whose
            very end it can. Other models have no such group: every KV block is an end

So what is restored of a prompt is its longest run of KV blocks that ends with an ENDS block.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from operator import attrgetter
from queue import Empty, SimpleQueue
from struct import Struct
from time import time
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import zmq

from pippin.cache.entries import little_endian
from pippin.cache.tree.components import STATE, WINDOW, Rules
from pippin.cache.tree.payload_tree import PayloadTree, TreeObserver
from pippin.cache.tree.radix import TOKEN_BYTES, Blocks, Node
from pippin.errors import ConfigError
from pippin.messages import RestorablePrefixes
from pippin.types import GRID

BLOCK_TOKENS = GRID  # checkpoints lie on multiples of it
BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
DIGEST_BYTES = 32
HASH = Struct(">q24x")  # of a digest
MAX_EVENT_BLOCKS = 4096  # of one event
KV, ENDS = 0, 1
START = attrgetter("start")


def hash_blocks(before: bytes, raw: bytes) -> bytes:
    """The digests of the whole blocks of `raw`, int32. `before`: that of the block before them."""
    data, digests = little_endian(raw), []
    for at in range(0, len(raw) - len(raw) % BLOCK_BYTES, BLOCK_BYTES):
        before = sha256(before + data[at : at + BLOCK_BYTES]).digest()
        digests.append(before)
    return b"".join(digests)


def hashes_of(digests: bytes) -> list[int]:
    """As they are published: 64 bits each, signed."""
    return [hash for (hash,) in HASH.iter_unpack(digests)]


def prompt_hashes(tokens: bytes, salt: bytes) -> list[int]:
    """Of the whole blocks of a prompt, as it is submitted."""
    return hashes_of(hash_blocks(salt, little_endian(tokens)))


class Stored(NamedTuple):
    """A run of blocks that follow each other."""

    group: int
    hashes: list[int]
    parent: int | None  # the hash of the block before them
    tokens: bytearray  # int32
    salt: bytes  # a digest


class Removed(NamedTuple):
    group: int
    hashes: list[int]


class BlockIndex(TreeObserver):
    """Changes of one tree mark its nodes; `take_changes` says what that changed of its blocks."""

    def __init__(self, tree: PayloadTree, *, salted: bool) -> None:
        """Without `salted` sequences with a salt are left out."""
        self._radix = tree.radix
        self._has_state = tree.rules.has_state
        self._window = tree.rules.window
        self._has_ends = tree.rules.has_state or tree.rules.has_window
        self._salted = salted
        self._gone: list[Blocks] = []  # of nodes that were removed
        self._dirty: dict[Node, None] = {}
        self._removed: tuple[dict[int, None], dict[int, None]] = ({}, {})
        self.num_blocks = 0  # in group KV
        self.was_flushed = False  # since the last `take_changes`: what it returns is all there is
        assert self._radix.root.blocks is None, "a tree has one index"
        self._radix.root.blocks = Blocks(b"", b"", 0, has_window=False)
        self.restate()
        self.was_flushed = False
        tree.observers += (self,)

    @property
    def has_changed(self) -> bool:
        return bool(self._dirty or self._gone or self.was_flushed)

    # ---- changes of the tree: these mark what is to be looked at -------------------------------

    def added(self, node: Node) -> None:
        self._dirty[node] = None

    def changed(self, node: Node) -> None:
        if node.epoch == self._radix.epoch:
            self._dirty[node] = None

    def split(self, upper: Node, lower: Node) -> None:
        blocks = lower.blocks
        if blocks is not None:
            at = upper.end // BLOCK_TOKENS - upper.start // BLOCK_TOKENS
            cut = at * DIGEST_BYTES
            upper.blocks = Blocks(
                blocks.digests[:cut],
                blocks.salt,
                min(blocks.first_end, at),
                has_window=blocks.has_window,
                is_live=blocks.is_live,
                num_live=int(blocks.is_live),
            )
            blocks.digests = blocks.digests[cut:]
            blocks.first_end = max(blocks.first_end - at, 0)
        self._dirty[upper] = self._dirty[lower] = None

    def removed(self, leaf: Node, parent: Node) -> None:
        self._dirty.pop(leaf, None)
        if leaf.blocks is None or leaf.epoch != self._radix.epoch:
            return
        self._gone.append(leaf.blocks)
        if leaf.blocks.is_live and parent.blocks is not None:
            parent.blocks.num_live -= 1
            self._dirty[parent] = None
        leaf.blocks = None

    def flushed(self, kept: Sequence[Node]) -> None:
        """All else is ignored from now on, however long it takes to free it."""
        self._gone.clear()
        self._dirty = dict.fromkeys(kept)
        for node in kept:
            if node.blocks is not None:
                node.blocks.forget()
        self.num_blocks = 0
        self.was_flushed = True

    def restate(self) -> None:
        """Return all blocks as stored, next."""
        self.flushed([node for node in self._radix.nodes() if not self._radix.is_flushed(node)])

    # ---- changes of the blocks ----------------------------------------------------------------

    def take_changes(self) -> list[Stored | Removed]:
        """Since the last call: what was removed, then what was stored, parents first."""
        self.was_flushed = False
        removed: tuple[dict[int, None], dict[int, None]] = ({}, {})
        for blocks in self._gone:
            hashes = hashes_of(blocks.digests)
            removed[ENDS].update(dict.fromkeys(hashes[blocks.first_end :]))
            if blocks.is_live:
                removed[KV].update(dict.fromkeys(hashes))
                self.num_blocks -= blocks.num_blocks
        self._gone.clear()
        stored = self._settle(removed)
        # Both cancel what was removed and stored.
        runs = [run for group in (KV, ENDS) for run in _runs(group, stored[group], removed[group])]
        changes: list[Stored | Removed] = []
        for group in (KV, ENDS):
            hashes = list(removed[group])
            starts = range(0, len(hashes), MAX_EVENT_BLOCKS)
            changes += [Removed(group, hashes[at : at + MAX_EVENT_BLOCKS]) for at in starts]
        return [*changes, *runs]

    def _settle(self, removed: Sequence[dict[int, None]]) -> Sequence[list[Part]]:
        """What is stored now, children before parents: whether a block is stored depends on what
        is below it."""
        dirty, self._dirty = self._dirty, {}
        left = {node for node in sorted(dirty, key=START) if self._has_blocks(node)}
        if self._window:
            for node in list(left):
                self._look_below(node, left)
        stored: tuple[list[Part], list[Part]] = ([], [])
        order = sorted(left, key=START)
        while order:
            node = order.pop()
            left.remove(node)
            blocks = node.blocks
            assert blocks is not None
            count = blocks.num_blocks
            first = self._first_end(node, count)
            if self._has_ends and first != blocks.first_end:
                if first < blocks.first_end:
                    stored[ENDS].append(Part(node, first, blocks.first_end))
                else:
                    gone = hashes_of(blocks.digests)[blocks.first_end : first]
                    removed[ENDS].update(dict.fromkeys(gone))
                blocks.first_end = first
            is_live = blocks.num_live > 0 or first < count
            if is_live == blocks.is_live:
                continue
            blocks.is_live = is_live
            if is_live:
                stored[KV].append(Part(node, 0, count))
            else:
                removed[KV].update(dict.fromkeys(hashes_of(blocks.digests)))
            self.num_blocks += count if is_live else -count
            parent = node.parent
            assert parent is not None
            assert parent.blocks is not None
            parent.blocks.num_live += 1 if is_live else -1
            only_one = parent.blocks.num_live == (1 if is_live else 0)
            if only_one and parent not in left and not parent.is_root:
                left.add(parent)
                insort(order, parent, key=START)
        return stored

    def _has_blocks(self, node: Node) -> bool:
        """Hashes them the first time; those of its parent were. False for what is left out."""
        parent = node.parent
        if parent is None or node.blocks is not None:
            return parent is not None
        if parent.blocks is None:
            return False
        salt = parent.blocks.salt
        if parent.is_root and isinstance(node.key, tuple):
            if not self._salted:
                return False
            salt = node.key[0]
        digests = hash_blocks(_digest_before(node) or salt, _whole_tokens(node))
        count, has_window = len(digests) // DIGEST_BYTES, node.payloads[WINDOW] is not None
        node.blocks = Blocks(digests, salt, count, has_window=has_window)
        return True

    def _look_below(self, node: Node, found: set[Node]) -> None:
        """Where its window was dropped or is back, windows of nodes below may reach back to it."""
        blocks, has_window = node.blocks, node.payloads[WINDOW] is not None
        if blocks is None or blocks.has_window == has_window:
            return
        blocks.has_window = has_window
        near = [node]
        while near:
            below = near.pop()
            found.add(below)
            near += [
                child
                for child in below.children.values()
                if child.start < node.end + self._window and self._is_known(child)
            ]

    def _is_known(self, node: Node) -> bool:
        return node.blocks is not None and node.epoch == self._radix.epoch

    def _first_end(self, node: Node, count: int) -> int:
        """The first of a node's blocks at whose end a prompt can be restored, as behind all that
        follow; `count` if there is none.

        The rule of `Rules.deepest_valid`, for all of its positions at once.
        """
        first = 0
        if self._has_state:
            if node.payloads[STATE] is None or node.end % BLOCK_TOKENS:
                return count
            first = count - 1
        if self._window:
            if node.payloads[WINDOW] is None:
                return count
            assert node.parent is not None
            for above in node.parent.back_to(node.start - self._window):
                if above.payloads[WINDOW] is None:  # no window may reach back to it
                    least = -(-(above.end + self._window) // BLOCK_TOKENS)
                    first = max(first, least - node.start // BLOCK_TOKENS - 1)
                    break
        return min(first, count)


class Part(NamedTuple):
    """Blocks [first, stop) of a node."""

    node: Node
    first: int
    stop: int


def _runs(group: int, parts: list[Part], removed: dict[int, None]) -> list[Stored]:
    """What is stored now, parents first, as runs. What was removed as well only moved to another
    node, and is neither."""
    runs: list[Stored] = []
    open_runs: dict[int | None, Stored] = {}  # by their last blocks
    for node, first, stop in reversed(parts):
        assert node.blocks is not None
        hashes, tokens = hashes_of(node.blocks.digests), _whole_tokens(node)
        before = hashes_of(_digest_before(node))
        moved = [at for at in range(first, stop) if hashes[at] in removed] if removed else []
        for at in moved:
            del removed[hashes[at]]
        for begin, end in _between(first, stop, moved):
            parent = hashes[begin - 1] if begin else before[0] if before else None
            run = open_runs.pop(parent, None)
            if run is None or len(run.hashes) + end - begin > MAX_EVENT_BLOCKS:
                run = Stored(group, [], parent, bytearray(), node.blocks.salt)
                runs.append(run)
            run.hashes.extend(hashes[begin:end])
            run.tokens.extend(tokens[begin * BLOCK_BYTES : end * BLOCK_BYTES])
            open_runs[run.hashes[-1]] = run
    return runs


def _between(first: int, stop: int, gaps: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Ranges of [first, stop) without the gaps, of a bounded length."""
    for gap in (*gaps, stop):
        for begin in range(first, gap, MAX_EVENT_BLOCKS):
            yield begin, min(begin + MAX_EVENT_BLOCKS, gap)
        first = gap + 1


def _digest_before(node: Node) -> bytes:
    """Of the last block that ends above a node; nothing if none does."""
    above = node.parent
    assert above is not None
    while above.parent is not None and above.blocks is not None and not above.blocks.digests:
        above = above.parent
    return b"" if above.blocks is None else above.blocks.digests[-DIGEST_BYTES:]


def _whole_tokens(node: Node) -> bytes:
    """A node's tokens, from the beginning of its first block on, which may lie above."""
    raw, above = node.tokens, node.parent
    left = node.start % BLOCK_TOKENS * TOKEN_BYTES
    while left:
        assert above is not None
        part = above.tokens[-left:]
        raw, left, above = part + raw, left - len(part), above.parent
    return raw


FormName = Literal["vllm", "sglang"]
Tier = Literal["memory", "host", "disk"]

MEDIA: dict[FormName, dict[Tier, str]] = {
    "vllm": {"memory": "GPU", "host": "CPU", "disk": "STORAGE"},
    "sglang": {"memory": "GPU", "host": "CPU_PINNED", "disk": "DISK"},
}


@dataclass(frozen=True)
class EventForm:
    name: FormName
    rules: Rules
    rank: int = 0  # of data parallelism: the number of this replica

    def batch(self, seconds: float, events: list[Any]) -> bytes:
        return msgspec.msgpack.encode([seconds, events, self.rank])

    @property
    def cleared(self) -> Any:
        """The event that nothing is cached any more."""
        return {"type": "AllBlocksCleared"} if self.name == "vllm" else ["AllBlocksCleared"]

    def events(self, tier: Tier, changes: Iterable[Stored | Removed]) -> list[Any]:
        medium = MEDIA[self.name][tier]
        if self.name == "sglang":
            return [_as_array(change, medium) for change in changes if change.group == KV]
        return [self._as_map(change, medium) for change in changes]

    def _as_map(self, change: Stored | Removed, medium: str) -> dict[str, Any]:
        has_groups = self.rules.has_state or self.rules.has_window
        group = {"group_idx": change.group} if has_groups else {}
        if isinstance(change, Removed):
            return {
                "type": "BlockRemoved",
                "block_hashes": change.hashes,
                "medium": medium,
                **group,
            }
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": change.hashes,
            "parent_block_hash": change.parent,
            "token_ids": _ids(change.tokens),
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            **group,
        }
        if change.salt and change.parent is None:  # the blocks behind it are named by its hash
            event["extra_keys"] = [[change.salt.hex()], *[None] * (len(change.hashes) - 1)]
        if has_groups:
            event |= self._kind(change.group)
        return event

    def _kind(self, group: int) -> dict[str, Any]:
        if group != ENDS:
            return {"kv_cache_spec_kind": "full_attention"}
        if self.rules.has_state:
            return {"kv_cache_spec_kind": "mamba"}
        return {
            "kv_cache_spec_kind": "sliding_window",
            "kv_cache_spec_sliding_window": self.rules.window,
        }


def _as_array(change: Stored | Removed, medium: str) -> list[Any]:
    if isinstance(change, Removed):
        return ["BlockRemoved", change.hashes, medium]
    salt = [{"cache_salt": change.salt.hex()}] if change.salt else []
    tokens = _ids(change.tokens)
    stored = [change.hashes, change.parent, tokens, BLOCK_TOKENS, None, medium]
    return ["BlockStored", *stored, *salt]


def _ids(tokens: bytearray) -> list[int]:
    ids: list[int] = np.frombuffer(tokens, dtype=np.int32).tolist()
    return ids


TOPIC = b"kv-events"
MAX_PAST = 10_000  # batches that can be sent again,
MAX_PAST_BYTES = 64 << 20  # of at most so many bytes
MAX_UNREAD = 10_000  # batches in the queue of a subscriber
MAX_REQUEST_BYTES = 1024  # of what others send
MAX_ANSWERS = 4  # replays in one turn
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class EventPublisher:
    """Used by one thread at a time."""

    def __init__(self, address: str, replay_address: str | None = None) -> None:
        """Raises ConfigError if one of them cannot be bound."""
        self._context = zmq.Context()
        self._next = 0
        self._past: deque[tuple[int, bytes]] = deque()
        self._past_bytes = 0
        try:
            self._pub = self._bind(zmq.PUB, "kv_events", address)
            self._router = None
            if replay_address is not None:
                self._router = self._bind(zmq.ROUTER, "kv_events_replay", replay_address)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, option: str, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNREAD + 1)  # a whole replay
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{option} is {address}, which cannot be used ({error}): use an address of this "
                "machine and a free port"
            ) from error
        return socket

    @property
    def addresses(self) -> list[str]:
        """As they were bound."""
        sockets = [socket for socket in (self._pub, self._router) if socket is not None]
        return [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets]

    def publish(self, batch: bytes) -> None:
        number, self._next = self._next, self._next + 1
        self._pub.send_multipart((TOPIC, _as_bytes(number), batch))
        self._past.append((number, batch))
        self._past_bytes += len(batch)
        while len(self._past) > MAX_PAST or self._past_bytes > MAX_PAST_BYTES:
            self._past_bytes -= len(self._past.popleft()[1])

    def answer(self) -> None:
        """Requests for past batches; what is no such request is dropped."""
        if self._router is None:
            return
        for _ in range(MAX_ANSWERS):
            if not self._router.poll(0):
                return
            frames = self._router.recv_multipart()
            if len(frames) != 3 or frames[1] or len(frames[2]) != NUMBER_BYTES:
                continue
            client, first = frames[0], int.from_bytes(frames[2], "big")
            for number, batch in self._past:
                if number >= first:
                    answer = (client, b"", TOPIC, _as_bytes(number), batch)
                    self._router.send_multipart(answer)
            self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._context.destroy(linger=0)


def _as_bytes(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


TURN_SECONDS = 0.05  # between looks at requests for past batches, where nothing changes
CLOSE_SECONDS = 2.0
PUBLISHING_FAILED = "KV events failed: no more are published"

Changes = list[tuple[Tier, list[Stored | Removed]]]
# Called with what has changed since the last call; `cleared`: before that, nothing is cached.
Listener = Callable[[Changes, bool], None]

logger = logging.getLogger(__name__)


class Announcer:
    """Called by the engine's thread, between steps."""

    def __init__(self) -> None:
        self._indexes: list[tuple[Tier, BlockIndex, PayloadTree]] = []
        self._listeners: list[Listener] = []

    def observe(self, tier: Tier, tree: PayloadTree, *, salted: bool = True) -> None:
        """What is in the tree, and what will be. Without `salted` sequences with a salt are left
        out: a tier below memory does not know their salts."""
        self._indexes.append((tier, BlockIndex(tree, salted=salted), tree))

    def add(self, listener: Listener) -> None:
        """Before the first `collect`."""
        self._listeners.append(listener)
        listener([], True)  # what an engine before this one announced is gone

    def collect(self) -> None:
        """Tell the listeners what has changed; a failure ends the events and not the engine."""
        if not any(index.has_changed for _, index, _ in self._indexes):
            return
        try:
            changes, cleared = self._changes()
            for listener in self._listeners if changes or cleared else ():
                listener(changes, cleared)
        except Exception:
            logger.exception(PUBLISHING_FAILED)
            for _, index, tree in self._indexes:
                tree.observers = tuple(one for one in tree.observers if one is not index)
            self._indexes.clear()
            for listener in self._listeners:
                listener([], True)

    def _changes(self) -> tuple[Changes, bool]:
        num_before = sum(index.num_blocks for _, index, _ in self._indexes)
        cleared = any(index.was_flushed for _, index, _ in self._indexes)
        for _, index, _ in self._indexes:
            if cleared and not index.was_flushed:
                index.restate()
        found = [(tier, index.take_changes()) for tier, index, _ in self._indexes]
        changes = [(tier, changed) for tier, changed in found if changed]
        if num_before and not any(index.num_blocks for _, index, _ in self._indexes):
            return [], True
        return changes, cleared


def prefix_reports(rules: Rules, send: Callable[[RestorablePrefixes], None]) -> Listener:
    """To the server, which routes requests by them."""
    reported = ENDS if rules.has_state or rules.has_window else KV

    def report(changes: Changes, cleared: bool) -> None:
        found = [one for _, changed in changes for one in changed if one.group == reported]
        stored = [hash for one in found if isinstance(one, Stored) for hash in one.hashes]
        removed = [hash for one in found if isinstance(one, Removed) for hash in one.hashes]
        if found or cleared:
            send(RestorablePrefixes(stored, removed, cleared))

    return report


class PublishingThread:
    """A listener that forms and publishes events in a thread of its own."""

    def __init__(self, form: EventForm, publisher: EventPublisher) -> None:
        self._form = form
        self._publisher = publisher
        self._queue: SimpleQueue[tuple[Changes, bool]] = SimpleQueue()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def __call__(self, changes: Changes, cleared: bool) -> None:
        if not self._stops.is_set():
            self._queue.put((changes, cleared))

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stops.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)
        else:
            self._publisher.close()

    def turn(self, wait_seconds: float = 0.0) -> None:
        """Publish what has changed; the first change may take `wait_seconds`."""
        try:
            while True:
                self._publish(*self._queue.get(wait_seconds > 0, wait_seconds))
                wait_seconds = 0.0
        except Empty:
            self._publisher.answer()

    def _publish(self, changes: Changes, cleared: bool) -> None:
        events = [self._form.cleared] if cleared else []
        for tier, changed in changes:
            events += self._form.events(tier, changed)
        if events:
            self._publisher.publish(self._form.batch(time(), events))

    def _run(self) -> None:
        try:
            while not self._stops.is_set():
                self.turn(TURN_SECONDS)
        except Exception:  # the engine goes on
            logger.exception(PUBLISHING_FAILED)
            self._stops.set()
            self._publish([], True)
        finally:
            self._publisher.close()
