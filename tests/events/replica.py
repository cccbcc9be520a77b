"""A watcher that keeps what it was told, as the page does, and can be held to the truth."""

from __future__ import annotations

from typing import Any

import msgspec

from builders import Client
from pippin.cache.tree.components import COMPONENTS
from pippin.cache.tree.radix import Node
from pippin.engine.events import schema
from pippin.engine.events.event_sender import EventSender
from pippin.engine.events.schema import Frame, Snapshot
from pippin.messages import FeedMessage


class Replica:
    def __init__(self) -> None:
        self.number: int | None = None  # of the last message; None: nothing was told yet
        self.steps: list[schema.StepEvent] = []
        self.requests: dict[str, schema.RequestEvent] = {}
        self.phases: dict[str, list[str]] = {}
        self.nodes: dict[int, schema.NodeEvent] = {}
        self.locked: set[int] = set()
        self.evicted: list[int] = []
        self.last: Snapshot | Frame | None = None

    def take(self, message: FeedMessage) -> None:
        if message.kind == "snapshot":
            told: Snapshot | Frame = msgspec.json.decode(message.json, type=Snapshot)
            self.nodes.clear()
            self.requests = {}
            self.steps = []
        else:
            told = msgspec.json.decode(message.json, type=Frame)
            assert self.number is None or told.number == self.number + 1, "a frame was lost"
        self.number = told.number
        self.last = told
        self.steps += told.steps
        for request in told.requests:
            self.requests[request.id] = request
            self.phases.setdefault(request.id, []).append(request.phase)
        if told.tree is not None:
            self._take_tree(told.tree)

    def _take_tree(self, tree: schema.TreeEvent) -> None:
        self.evicted += tree.evicted
        for node in tree.nodes:
            assert node.parent == 0 or node.parent in self.nodes, "parents come first"
            self.nodes[node.id] = node
        for id in (*tree.evicted, *tree.hidden):
            del self.nodes[id]
        assert set(tree.used) <= self.nodes.keys()
        self.locked = set(tree.locked)
        assert self.locked <= self.nodes.keys()

    def check(self, client: Client, *, complete: bool = True) -> None:
        """Whatever is known is true; if `complete`, all of it is known."""
        cache = client.loop.scheduler.cache
        assert cache is not None
        truth = {node.id: node for node in _all_nodes(cache.radix.root)}
        assert self.nodes.keys() <= truth.keys()
        if complete:
            assert self.nodes.keys() == truth.keys()
            assert self.locked == {node.id for node in cache.locked_ends}
        for id, told in self.nodes.items():
            assert _facts(told) == _true_facts(truth[id])
            assert told.parent == 0 or told.parent in self.nodes


def _facts(node: schema.NodeEvent) -> dict[str, Any]:
    told = msgspec.to_builtins(node)
    return {name: told[name] for name in ("parent", "start", "tokens", "children", "bytes", "hits")}


def _true_facts(node: Node) -> dict[str, Any]:
    assert node.parent is not None
    held = zip(COMPONENTS, node.payloads, strict=True)
    return {
        "parent": node.parent.id,
        "start": node.start,
        "tokens": node.num_tokens,
        "children": len(node.children),
        "bytes": {kind.value: payload.nbytes for kind, payload in held if payload is not None},
        "hits": node.hits,
    }


def _all_nodes(root: Node) -> list[Node]:
    found = list(root.children.values())
    for node in found:
        found += node.children.values()
    return found


class Watched:
    """A client whose loop has a feed, by a clock that the test moves."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.now = 100.0
        self.messages: list[FeedMessage] = []
        self.feed = EventSender(client.loop, self.messages.append, lambda: self.now)
        self.replica = Replica()

    def flush(self, seconds: float = 1.0) -> int:
        """Let time pass and take in what is told; how many messages that were."""
        self.now += seconds
        self.feed.flush()
        messages, self.messages[:] = list(self.messages), []
        for message in messages:
            self.replica.take(message)
        return len(messages)

    def run(self) -> None:
        while not self.client.loop.idle:
            self.client.step()
            self.flush(0.11)
        self.flush()
