"""Hands what steps captured to the tree. Knows who a capture belongs to, not what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pippin.backends.base import Capture
from pippin.cache.prefix_cache import InsertResult, PrefixCache
from pippin.scheduler.request import Request
from pippin.types import Payload


def take_captures(
    cache: PrefixCache,
    captures: Sequence[Capture],
    owners: Mapping[int, Request],
    retired: Mapping[int, Request],
) -> None:
    """Insert a committed step's captures under the tokens of whoever owned the slot in that step.

    States of a growing reply have no path in the tree yet: their request keeps them until it
    retires, when one or more captures bring the KV they belong to.
    """
    for capture in captures:
        owner = (retired if capture.retired else owners)[capture.slot]
        if not capture.retired and capture.start >= owner.prompt_len:
            owner.states.update(capture.states)
            continue
        states = dict(capture.states)
        if capture.retired:
            states |= _reply_states(owner, capture)
        placements = cache.policy.placements(
            capture.start,
            capture.end,
            prompt_len=owner.prompt_len,
            boundaries=owner.boundaries,
            branch=owner.branch,
        )
        tokens = owner.tokens(capture.end)
        found = cache.insert(tokens, capture.start, capture.kv, states, placements=placements)
        if found.inserted:
            _hold(cache, owner, found)
        owner.in_tree = max(owner.in_tree, capture.end)
    for owner in retired.values():
        release_states(owner)


def _hold(cache: PrefixCache, owner: Request, inserted: InsertResult) -> None:
    """Move a running request's lock to the end of what it has put into the tree."""
    if owner.lock is not None:
        old, owner.lock = owner.lock, cache.lock(inserted)
        cache.unlock(old)


def release_states(request: Request) -> None:
    for state in request.states.values():
        state.release()
    request.states = {}


def _reply_states(owner: Request, capture: Capture) -> dict[int, Payload]:
    """The checkpoints that `capture` carries into the tree; one it already holds stays behind."""
    usable = [at for at in owner.states if at <= capture.end and at not in capture.states]
    return {at: owner.states.pop(at) for at in usable}
