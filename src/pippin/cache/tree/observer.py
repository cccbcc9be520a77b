"""What an observer of the tree is called with. Knows no observer."""

from __future__ import annotations

from collections.abc import Sequence

from pippin.cache.tree.radix import Node


class TreeObserver:
    """Called during a change, after it has happened; never raises. Does nothing by default.

    Nodes may be kept until `removed` names them.
    """

    def added(self, node: Node) -> None: ...

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new, and has the first tokens of `lower`."""

    def changed(self, node: Node) -> None:
        """A payload was attached or released, or a match ended there."""

    def removed(self, leaf: Node, parent: Node) -> None:
        """`parent` is the one that it had."""

    def flushed(self, nodes: Sequence[Node]) -> None:
        """No match reaches these and all below them any more; `removed` names each in time."""

    def used(self, node: Node) -> None:
        """The path that ends there."""
