"""Counts all that a tier has again, and compares."""

from __future__ import annotations

from collections import Counter

from pippin.cache.tiers.cache_tier import CacheTier
from pippin.cache.tiers.tier_io import EntryPart, Owned


def check_tier(tier: CacheTier) -> None:
    tier.memory.check_integrity()
    tier.cache.check_integrity()
    live: Counter[Owned] = Counter()
    for node in tier.cache.radix.nodes():
        for payload in node.payloads:
            if payload is not None:
                assert isinstance(payload, EntryPart)
                live[payload.owner] += payload.num_tokens
                assert payload.node is node, "a part does not know its node"
    owned = {owner: sum(part.num_tokens for part in owner.parts) for owner in live}
    assert live == owned, "entries of a tier and parts in its tree do not add up"
    named = set(tier._owned.values())
    assert named <= live.keys(), "the tree names an entry of which it has nothing"
    assert all(map(tier._is_flushed, live.keys() - named)), "an entry is named twice"
    assert tier._lost.keys() <= tier._owned.keys(), "what is not in the tree is kept as lost"
