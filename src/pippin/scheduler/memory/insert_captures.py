"""Inserts what steps captured into the tree. Knows a capture's owner, not what it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pippin.backends.base import Capture
from pippin.cache.prefix_cache import PrefixCache
from pippin.scheduler.memory.byte_budget import ByteBudget
from pippin.scheduler.request import Request
from pippin.scheduler.running_slot import RunningSlot
from pippin.types import Payload


class Inserted(NamedTuple):
    """The tree holds so much of a request's tokens."""

    request: Request
    length: int
    whole: bool  # all of its prompt, or of its reply


def take_captures(
    captures: Sequence[Capture],
    owners: Mapping[int, RunningSlot],
    retired: Mapping[int, RunningSlot],
    cache: PrefixCache,
    budget: ByteBudget,
) -> list[Inserted]:
    """Insert a committed step's captures under the tokens of the request that had the slot then.

    States of a growing reply have no path in the tree yet: their `RunningSlot` keeps them until it
    retires, when one or more captures bring the KV they belong to. They come first, so that the
    bytes which the step had claimed are theirs before the tree grows into them.
    """
    to_insert: list[tuple[Capture, RunningSlot]] = []
    for capture in captures:
        running = (retired if capture.retired else owners)[capture.slot]
        if running.tainted:
            capture.release()
        elif not capture.retired and capture.start >= running.prefill_len:
            running.keep_checkpoints(capture.states, budget)
        else:
            to_insert.append((capture, running))
    inserted: list[Inserted] = []
    for capture, running in to_insert:
        if _insert(capture, running, cache, budget):
            whole = capture.retired or capture.end == running.capture_len
            inserted.append(Inserted(running.request, capture.end, whole))
    return inserted


def _insert(capture: Capture, running: RunningSlot, cache: PrefixCache, budget: ByteBudget) -> bool:
    """Whether it connected to what the tree holds."""
    request = running.request
    states = dict(capture.states)
    if capture.retired:
        states |= _checkpoints_up_to(capture, running, budget)
    placements = cache.policy.placements(
        capture.start,
        capture.end,
        prompt_len=running.prefill_len,
        boundaries=request.boundaries,
        branch=running.branch,
    )
    tokens = request.tokens(capture.end)
    found = cache.insert(
        tokens,
        capture.start,
        capture.kv,
        states,
        capture.hidden,
        salt=request.salt,
        placements=placements,
    )
    if not found.inserted:
        running.lost_tree(capture.start - found.gap)
        return False
    running.entered_tree(capture.end)
    if not capture.retired and capture.end < running.capture_len:  # the next chunk connects to it
        running.move_tip(cache, cache.lock(found))
    return True


def _checkpoints_up_to(
    capture: Capture, running: RunningSlot, budget: ByteBudget
) -> dict[int, Payload]:
    """What `capture` carries into the tree beside its own; a state it has itself stays behind."""
    usable = [at for at in running.checkpoints if at <= capture.end and at not in capture.states]
    return running.take_checkpoints(usable, budget)
