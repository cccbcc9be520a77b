"""Announces what the trees of an engine cache, from a thread of its own. Knows no sockets.

    tree ── observer: copies of its changes ──▶ queue ──▶ BlockIndex ──▶ EventForm ──▶ publisher

In the engine's thread a change of the tree costs one call and one entry of the queue.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from time import time
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import zmq

from pippin.cache.tree.components import Rules
from pippin.cache.tree.payload_tree import PayloadTree, TreeObserver
from pippin.cache.tree.radix import Node
from pippin.engine.kv_events.block_index import BLOCK_TOKENS, ENDS, KV, BlockIndex, Removed, Stored
from pippin.errors import ConfigError
from pippin.messages import RestorablePrefixes

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


def _ids(tokens: bytes) -> list[int]:
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

    @property
    def num_past(self) -> int:
        return len(self._past)

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
MAX_CHANGES = 4096  # of trees, in one batch
CLOSE_SECONDS = 2.0

Change = tuple[Callable[..., None], tuple[Any, ...]]

logger = logging.getLogger(__name__)


class Form(Protocol):
    """What changes look like to those who read them."""

    @property
    def cleared(self) -> Any:
        """The event that nothing is cached any more."""
        ...

    def events(self, tier: Tier, changes: Iterable[Stored | Removed]) -> list[Any]: ...

    def batch(self, seconds: float, events: list[Any]) -> Any: ...


class Publisher(Protocol):
    """How batches reach those who read them. Used by one thread at a time."""

    def publish(self, batch: Any) -> None: ...

    def answer(self) -> None:
        """Requests for past batches."""
        ...

    def close(self) -> None: ...


class Announcer:
    def __init__(self, form: Form, publisher: Publisher) -> None:
        self._form = form
        self._publisher = publisher
        self._changes: SimpleQueue[Change] = SimpleQueue()
        self._indexes: list[tuple[Tier, BlockIndex]] = []
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._publish([form.cleared])  # what an engine before this one announced is gone

    def observe(self, tier: Tier, tree: PayloadTree, *, salted: bool = True) -> None:
        """What is in the tree, and what will be. Without `salted` sequences with a salt are left
        out: a tier below memory does not know their salts."""
        index = BlockIndex(tree.rules)
        self._indexes.append((tier, index))
        observer = _Changes(index, self._changes, self._stops, salted=salted)
        for node in tree.radix.nodes():
            if not tree.radix.is_flushed(node):
                observer.added(node)
        tree.observers += (observer,)

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
        self._take_in(wait_seconds)
        events: list[Any] = []
        for tier, index in self._indexes:
            events += self._form.events(tier, index.take_changes())
        if events and not any(index.num_blocks for _, index in self._indexes):
            events = [self._form.cleared]
        if events:
            self._publish(events)
        self._publisher.answer()

    def _take_in(self, wait_seconds: float) -> None:
        try:
            change, arguments = self._changes.get(wait_seconds > 0, wait_seconds)
            change(*arguments)
            for _ in range(MAX_CHANGES):
                change, arguments = self._changes.get_nowait()
                change(*arguments)
        except Empty:
            return

    def _publish(self, events: list[Any]) -> None:
        self._publisher.publish(self._form.batch(time(), events))

    def _run(self) -> None:
        try:
            while not self._stops.is_set():
                self.turn(TURN_SECONDS)
        except Exception:  # the engine goes on
            logger.exception("KV events failed: no more are published")
            self._stops.set()
            self._publish([self._form.cleared])
        finally:
            self._publisher.close()


class _Changes(TreeObserver):
    """Copies what changes of a tree, in the thread that changes it."""

    def __init__(
        self,
        index: BlockIndex,
        changes: SimpleQueue[Change],
        stops: threading.Event,
        *,
        salted: bool,
    ) -> None:
        self._index = index
        self._changes = changes
        self._stops = stops
        self._salted = salted

    def added(self, node: Node) -> None:
        assert node.parent is not None
        salt = node.key[0] if isinstance(node.key, tuple) else b""
        if self._salted or not salt:  # the index ignores all below one that it does not know
            place = (node.id, node.parent.id, node.tokens, salt, _held(node))
            self._put(self._index.added, *place)

    def split(self, upper: Node, lower: Node) -> None:
        helds = (_held(upper), _held(lower))
        self._put(self._index.split, upper.id, lower.id, upper.num_tokens, helds)

    def changed(self, node: Node) -> None:
        self._put(self._index.changed, node.id, _held(node))

    def removed(self, leaf: Node, parent: Node) -> None:
        self._put(self._index.removed, leaf.id)

    def flushed(self, nodes: Sequence[Node]) -> None:
        self._put(self._index.flushed, [node.id for node in nodes])

    def _put(self, change: Callable[..., None], *arguments: Any) -> None:
        if not self._stops.is_set():
            self._changes.put((change, arguments))


def _held(node: Node) -> int:
    attention, window, state, hidden = node.payloads
    return (
        (attention is not None)
        | (window is not None) << 1
        | (state is not None) << 2
        | (hidden is not None) << 3
    )


PrefixChange = Stored | Removed | None  # None: nothing is cached any more


class PrefixReports:
    """A form and a publisher of an Announcer in one."""

    cleared: PrefixChange = None

    def __init__(self, rules: Rules, send: Callable[[RestorablePrefixes], None]) -> None:
        self._group = ENDS if rules.has_state or rules.has_window else KV
        self._send = send

    def events(self, tier: str, changes: Iterable[Stored | Removed]) -> list[PrefixChange]:
        return [change for change in changes if change.group == self._group]

    def batch(self, seconds: float, events: list[PrefixChange]) -> RestorablePrefixes:
        stored = [each.hashes for each in events if isinstance(each, Stored)]
        removed = [each.hashes for each in events if isinstance(each, Removed)]
        return RestorablePrefixes(
            list(chain.from_iterable(stored)), list(chain.from_iterable(removed)), None in events
        )

    def publish(self, batch: RestorablePrefixes) -> None:
        self._send(batch)

    def answer(self) -> None:
        """The channel loses nothing: there is nothing to send again."""

    def close(self) -> None:
        """The channel is closed by the process that has it."""
