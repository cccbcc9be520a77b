"""Prefixes that running requests are bringing into the tree, and who had better wait for one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pippin.scheduler.holding import Holding
from pippin.scheduler.request import KEY_TOKENS, Request
from pippin.types import GRID

REPLY_TOKENS = KEY_TOKENS  # of a reply that are worth a wait of two steps; fewer are not seen


class Arriving:
    def __init__(self, holdings: Iterable[Holding]) -> None:
        self._bringing: dict[bytes, list[Holding]] = {}  # by `Request.key`
        for holding in holdings:
            if holding.num_arriving > holding.in_tree:
                self.add(holding)

    def __len__(self) -> int:
        return len(self._bringing)

    def add(self, holding: Holding) -> None:
        if key := holding.request.key:
            self._bringing.setdefault(key, []).append(holding)

    def has_more(
        self, request: Request, matched: int, *, knows_head: bool, deterministic: bool
    ) -> bool:
        """Whether somebody is about to bring at least a block more than the tree has now.

        Less is worth a wait if it is a whole reply, which comes with the next step or the one after
        it, and whose end is what the next turn of a conversation continues; or this very prompt.
        """
        for other in self._bringing.get(request.key, ()):
            num_arriving = other.num_arriving
            needed = matched + GRID
            same_prompt = knows_head and other.prefill_len == request.num_tokens
            if (other.request.completed or same_prompt) and not deterministic:
                needed = min(needed, max(num_arriving, matched + REPLY_TOKENS))
            if num_arriving <= other.in_tree or num_arriving < needed:
                continue
            tokens = request.tokens(request.num_tokens)
            shared = common_prefix_len(tokens, other.request.tokens(num_arriving))
            if shared >= needed and shared > other.in_tree:
                return True
        return False


def common_prefix_len(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n
