"""What somebody who watches the tree hears. Knows nobody who does."""

from __future__ import annotations

from typing import Protocol

from pippin.cache.tree.radix import Node


class TreeObserver(Protocol):
    """Called in the middle of a change, when it has happened; never raises.

    Nodes may be kept until `removed` names them.
    """

    def added(self, node: Node) -> None: ...

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is new, and took the first tokens of `lower`."""
        ...

    def changed(self, node: Node) -> None:
        """A payload of it came or went, or a match ended there."""
        ...

    def removed(self, leaf: Node, parent: Node) -> None:
        """`parent` is the one that it had."""
        ...

    def used(self, node: Node) -> None:
        """The path that ends there."""
        ...
