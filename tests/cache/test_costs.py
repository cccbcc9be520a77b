"""What operations cost does not grow with the tree.

Costs are counted in lines of Python that run, which is the same on every machine, fast or busy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from naive_cache import A, S, W

from pippin.cache import prefix_cache
from pippin.cache.canary import MAX_COUNTED, NUM_SWEPT, Canary
from pippin.cache.prefix_cache import PrefixCache
from pippin.types import Component, Payload

CACHE = str(Path(prefix_cache.__file__).parent)
LAYOUTS = {"attention": [A], "state": [A, S], "window": [A, W], "all": [A, W, S]}
over_layouts = pytest.mark.parametrize("layout", LAYOUTS)
BLOCK = 4  # tokens of a node
WINDOW = 10
SIZES = (30, 400)  # leaves


@dataclass(frozen=True)
class Sized:
    """A payload that is only a number of bytes."""

    num_tokens: int
    nbytes: int

    def split(self, at: int) -> tuple[Payload, Payload]:
        head = self.nbytes * at // self.num_tokens
        return Sized(at, head), Sized(self.num_tokens - at, self.nbytes - head)

    def release(self) -> None:
        pass

    def fingerprint(self) -> int:
        return 0


def num_lines(operation: Callable[[], object]) -> int:
    """How many lines of the cache run in `operation`."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        if not frame.f_code.co_filename.startswith(CACHE):
            return None  # a garbage collector's callback, or a test's
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return count


def conversation(number: int, num_blocks: int = 6) -> np.ndarray:
    """The first block is the same in all of them."""
    return np.array([7] * BLOCK + [100 + number] * BLOCK * (num_blocks - 1), dtype=np.int32)


def insert_block(cache: PrefixCache, tokens: np.ndarray, layout: list[Component]) -> None:
    """Insert the last block of these tokens."""
    kv = {c: Sized(BLOCK, 4 * BLOCK) for c in layout if c is not S}
    states = {len(tokens): Sized(1, 10)} if S in layout else {}
    cache.insert(tokens, len(tokens) - BLOCK, kv, states)


def insert_all(cache: PrefixCache, tokens: np.ndarray, layout: list[Component]) -> None:
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        insert_block(cache, tokens[:end], layout)


def make_cache(layout: str, num_leaves: int, canary: Canary | None = None) -> PrefixCache:
    components = LAYOUTS[layout]
    cache = PrefixCache(
        components,
        window=WINDOW if W in components else 0,
        capacity_bytes=1 << 60,
        canary=canary,
    )
    for number in range(num_leaves):
        insert_all(cache, conversation(number), components)
    return cache


def use_all(cache: PrefixCache, num_leaves: int) -> None:
    for number in range(num_leaves):
        cache.match(conversation(number))


def worst_eviction(cache: PrefixCache) -> int:
    """The dearest of the evictions, each of one thing, by which a third of the bytes goes."""
    enough = cache.nbytes * 2 // 3
    worst = 0
    while cache.nbytes > enough:
        worst = max(worst, num_lines(lambda: cache.evict(1)))
    return worst


@pytest.mark.slow
@over_layouts
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_an_eviction_costs_the_same_in_a_tree_of_any_size(layout: str, used: bool) -> None:
    worst = []
    for num_leaves in SIZES:
        cache = make_cache(layout, num_leaves)
        if used:
            use_all(cache, num_leaves)
        worst.append(worst_eviction(cache))
    small, large = worst
    assert large < 2 * small, "more than deeper heaps explain"
    assert large < 3_000


@pytest.mark.slow
@over_layouts
def test_a_turn_of_a_conversation_costs_the_same_in_a_tree_of_any_size(layout: str) -> None:
    def turn(cache: PrefixCache) -> None:
        prompt = conversation(5, num_blocks=7)
        cache.probe(prompt)
        lock = cache.lock(cache.match(prompt))
        insert_block(cache, prompt, LAYOUTS[layout])
        cache.unlock(lock)

    small, large = (num_lines(partial(turn, make_cache(layout, size))) for size in SIZES)
    assert large < 1.5 * small
    assert large < 1_500


@over_layouts
def test_a_report_costs_the_same_in_a_tree_of_any_size(layout: str) -> None:
    small, large = (num_lines(make_cache(layout, size).report) for size in SIZES)
    assert large == small


@over_layouts
def test_a_lock_that_moves_on_climbs_only_what_was_added(layout: str) -> None:
    lines = []
    for num_blocks in (20, 200):
        cache = make_cache(layout, num_leaves=0)
        insert_all(cache, conversation(0, num_blocks), LAYOUTS[layout])
        lock = cache.lock(cache.match(conversation(0, num_blocks)))
        longer = conversation(0, num_blocks + 1)
        insert_block(cache, longer, LAYOUTS[layout])
        inserted = cache.insert(longer, len(longer), {}, {})
        lines.append(num_lines(lambda: (cache.lock(inserted), cache.unlock(lock))))  # noqa: B023
    assert lines[0] == lines[1]


def test_a_logging_canary_does_not_count_a_large_tree_when_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = make_cache("attention", MAX_COUNTED // 5 + 1, canary=Canary("log"))
    assert cache._tree.num_nodes > MAX_COUNTED
    assert num_lines(cache.check_when_idle) < 10_000
    node = next(iter(cache._tree.root.children.values()))
    assert node.chain is not None
    node.chain[0] ^= np.uint64(1)
    for _ in range(cache._tree.num_nodes // NUM_SWEPT + 1):  # still, every node's turn comes
        cache.check_when_idle()
    assert "holds another sequence" in caplog.text
