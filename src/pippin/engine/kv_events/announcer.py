"""Announces what the trees of an engine cache, from a thread of its own. Knows no sockets.

    tree ── observer: copies of its changes ──▶ queue ──▶ BlockIndex ──▶ EventForm ──▶ publisher

In the engine's thread a change of the tree costs one call and one entry of the queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from time import time
from typing import Any, Protocol

from pippin.cache.tree.observer import TreeObserver
from pippin.cache.tree.payload_tree import PayloadTree
from pippin.cache.tree.radix import Node
from pippin.engine.kv_events.block_index import BlockIndex, Removed, Stored
from pippin.engine.kv_events.event_forms import Tier

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
