"""What operations cost does not grow with the tree.

Costs are counted in lines of Python that run, which is the same on every machine, fast or busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from naive_cache import A, H, S, W

from cases import cases
from counted_lines import num_lines
from integrity import check_tier
from memory_store import MemoryStore
from pippin.backends.fake import FakeBackend
from pippin.cache.entries import ArraySpec, Key
from pippin.cache.prefix_cache import PrefixCache
from pippin.cache.tiers.cache_tier import MAX_REMOVALS, CacheTier, Diff, Run
from pippin.cache.tree.canary import Canary
from pippin.types import Component, Payload

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
@cases("used", [False, True], ids=["unused", "used"])
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


def test_what_a_tier_lacks_of_a_conversation_costs_so_much_a_turn() -> None:
    """Each turn leaves a hidden vector, and so a window that a restore needs."""
    lines = []
    for num_turns in (40, 160):
        above, below = (
            PrefixCache([A, W, H], window=WINDOW, capacity_bytes=1 << 60) for _ in range(2)
        )
        tokens = conversation(0, num_turns)
        for cache in (above, below):
            for end in range(BLOCK, len(tokens) + 1, BLOCK):
                kv = {c: Sized(BLOCK, 4 * BLOCK) for c in (A, W)}
                cache.insert(tokens[:end], end - BLOCK, kv, {}, Sized(1, 10))

        def one_array(_: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
            return (ArraySpec("", "uint8", (num_tokens,)),)

        diff = Diff(above.rules, above, below, one_array, 1 << 30)
        lines.append(num_lines(lambda: diff.find(tokens)))  # noqa: B023
        assert not diff.runs
    short, long = lines
    assert long < 5 * short


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


# ---- what a tier below memory evicts --------------------------------------------------------

ORDERS: dict[str, tuple[Component, ...]] = {
    "attention first": (A, W, S, H),
    "hidden first": (H, S, W, A),
    "states first": (S, H, W, A),
    "states alone": (S,),
    "hidden alone": (H,),
    "windows alone": (W,),
}


def make_tier(layout: str, num_leaves: int) -> tuple[CacheTier, list[list[Key]]]:
    """Conversations in two entries of each component, which begin alike; with their keys."""
    components = (*LAYOUTS[layout], H)
    window = WINDOW if W in components else 0
    backend = FakeBackend(components=components, window=window or 16)
    tree = CacheTier(
        PrefixCache(components, window=window, capacity_bytes=None),
        MemoryStore(b"m", 0),
        backend.spec,
        backend.payload_arrays,
        canary=Canary("off"),
        batch_bytes=0,
    )
    found: list[list[Key]] = []
    for number in range(num_leaves):
        tokens, keys = conversation(number), []
        for start, end in ((0, BLOCK), (BLOCK, 4 * BLOCK), (4 * BLOCK, 6 * BLOCK)):
            for component in components:
                divides = component in (A, W)
                run = Run(component, start if divides else end, end, ())
                (entry,) = tree.entries(tokens, [run])
                tree.add(tokens, [entry])
                if start:  # the first part is every conversation's
                    keys.append(entry.key)
        found.append(keys)
    tree.remove_lost()  # as a step does: what was added lets more be removed
    return tree, found


def remove_all_lost(tree: CacheTier) -> int:
    """Removes all that was lost; the lines of the dearest of the calls that it takes."""
    worst = 0
    while tree._lost:
        worst = max(worst, num_lines(tree.remove_lost))
    return worst


@over_layouts
@cases("order", ORDERS)
def test_what_a_store_evicts_costs_the_same_in_a_tree_of_any_size(layout: str, order: str) -> None:
    lines = []
    for num_leaves in SIZES:
        tree, keys = make_tier(layout, num_leaves)
        lost = [key for own in keys[:5] for key in own if key.component in ORDERS[order]]
        lost.sort(key=lambda key: ORDERS[order].index(key.component))
        spent = num_lines(partial(tree.lose, lost))
        while tree._lost:
            spent += num_lines(tree.remove_lost)
        assert not set(lost) & set(tree._owned)
        check_tier(tree)
        lines.append(spent)
    assert lines[1] < 1.5 * lines[0] + 10, "more than deeper heaps explain"


@over_layouts
def test_a_step_removes_a_bounded_number_of_nodes_however_much_was_evicted(layout: str) -> None:
    """A whole segment, and the entry that all others hang below."""
    worst = []
    for num_leaves in SIZES:
        tree, keys = make_tier(layout, num_leaves)
        tree.lose(key for own in keys for key in own)
        worst.append(remove_all_lost(tree))
        assert tree.cache.radix.num_nodes == 1
    for num_leaves in SIZES:
        tree, keys = make_tier(layout, num_leaves)
        tree.lose([tree.entries(conversation(0), [Run(A, 0, BLOCK, ())])[0].key])
        worst.append(remove_all_lost(tree))
        assert tree.cache.radix.num_nodes == 0
    assert max(worst) < 10_000
    assert worst[1] < 1.5 * worst[0]
    assert worst[3] < 1.5 * worst[2]


def test_steps_that_add_much_remove_as_much_of_what_was_evicted() -> None:
    """Else a store that writes a lot would leave more and more behind in the tree."""
    tree, keys = make_tier("state", 100)
    tree.lose(key for own in keys[:90] for key in own)
    num_added = 4 * MAX_REMOVALS
    for step in range(3):
        before = len(tree._lost)
        for number in range(num_added):
            tokens = conversation(1_000 + step * num_added + number)
            tree.add(tokens, tree.entries(tokens, [Run(A, BLOCK, len(tokens), ())]))
        tree.remove_lost()
        assert len(tree._lost) <= before - num_added
