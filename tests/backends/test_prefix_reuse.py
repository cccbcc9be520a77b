"""Warm == cold, token by token, on every family and on the bundled model.

Each scenario also counts the prompt tokens that were really computed, and holds them to the bound:
1 token of a shared prefix where all layers attend (windows included), 127 where some keep a state,
and none of a prompt that was there as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from builders import Client
from near_ties import assert_same
from pippin.cache.tree.components import ATTENTION, STATE, WINDOW
from pippin.cache.tree.eviction import Unit
from serving import (
    BUNDLED_ON_EITHER,
    ON_EITHER_BACKEND,
    TRIED_MOST,
    ask_all,
    cache_of,
    check_idle,
    cold,
    counted_prompts,
    diverge,
    make_client,
    make_prompt,
    most_recomputed,
    nodes_of,
)

pytestmark = pytest.mark.slow

# One model of each kind is tried with all of these, the others with few.
OFFSETS = (*range(60, 69), *range(124, 133))
FEW_OFFSETS = (63, 64, 65, 128)
LENS = (2, 63, 64, 65, 127, 128, 129, 150)
FEW_LENS = (64, 129)
BASE_LEN = 140


def ask_warm(client: Client, name: str, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Ask for all at once: right, and counted honestly. The cached tokens of each."""
    with counted_prompts() as counted:
        warm = ask_all(client, prompts)
    assert_same(warm, cold(name, prompts))
    cached = [reply.cached_tokens or 0 for reply in warm]
    assert counted.take() == sum(map(len, prompts)) - sum(cached)
    check_idle(client)
    return cached


def check_warm(
    client: Client, name: str, prompts: Sequence[Sequence[int]], shared: Sequence[int]
) -> None:
    """Little of what was shared is computed again."""
    cached = ask_warm(client, name, prompts)
    for found, common in zip(cached, shared, strict=True):
        assert common - most_recomputed(name) <= found <= common


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_divergence_at_every_offset_around_the_grid(name: str) -> None:
    offsets = OFFSETS if name in TRIED_MOST else FEW_OFFSETS
    client = make_client(name)
    bases = [make_prompt(name, BASE_LEN, seed) for seed in range(len(offsets))]
    ask_all(client, bases, max_tokens=1)
    prompts = [
        diverge(name, base, at, 1 + number % 20, seed=200 + number)
        for number, (base, at) in enumerate(zip(bases, offsets, strict=True))
    ]
    check_warm(client, name, prompts, offsets)


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_the_same_prompt_again_and_one_token_more(name: str) -> None:
    client = make_client(name)
    lens = LENS if name in TRIED_MOST else FEW_LENS
    bases = [make_prompt(name, n, seed=7) for n in lens]
    expected = cold(name, bases)
    assert_same(ask_all(client, bases), expected)
    assert ask_warm(client, name, bases) == list(lens)
    longer = [[*base, *make_prompt(name, 1, seed=n)] for base, n in zip(bases, lens, strict=True)]
    check_warm(client, name, longer, lens)


@pytest.mark.parametrize("name", [*ON_EITHER_BACKEND, *BUNDLED_ON_EITHER])
def test_turns_find_the_replies_before_them(name: str) -> None:
    client = make_client(name)
    histories = [
        make_prompt(name, n, seed=11) for n in ((40, 62, 90) if name in TRIED_MOST else (90,))
    ]
    for turn, max_tokens in enumerate((3, 70 if name in TRIED_MOST else 35)):
        replies = ask_all(client, histories, max_tokens=max_tokens)
        answered = [[*h, *r.tokens] for h, r in zip(histories, replies, strict=True)]
        users = [make_prompt(name, 5 + turn, seed=20 + i) for i in range(len(answered))]
        histories = [[*a, *user] for a, user in zip(answered, users, strict=True)]
        check_warm(client, name, histories, [len(a) for a in answered])


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_siblings_that_branch_in_the_middle(name: str) -> None:
    """All at once: the first computes what they share, the others wait for it."""
    client = make_client(name)
    trunk = make_prompt(name, 100, seed=31)
    siblings = [diverge(name, trunk, 100, n, seed=40 + n) for n in (1, 20, 28, 29, 60)]
    cached = ask_warm(client, name, siblings)
    assert sum(found >= 100 - most_recomputed(name) for found in cached) >= len(siblings) - 1
    twigs = [diverge(name, siblings[-1], at, 9, seed=50 + at) for at in (90, 101, 128, 150)]
    check_warm(client, name, twigs, [90, 101, 128, 150])


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_after_eviction_of_the_middle_of_a_path(name: str) -> None:
    """States and windows go from the middle; attention KV only from the end."""
    client = make_client(name)
    base = make_prompt(name, 200, seed=61)
    longer = diverge(name, base, 200, 70, seed=62)
    ask_all(client, [base])
    ask_all(client, [longer])
    store = cache_of(client).tree
    for node in nodes_of(client, longer):
        if 64 < node.end < 250 and node.children:
            for unit, index in ((Unit.STATE, STATE), (Unit.WINDOW, WINDOW)):
                if node.payloads[index] is not None:
                    store.take(node, unit)
    leaf = nodes_of(client, longer)[-1]
    if leaf.payloads[ATTENTION] is not None and not leaf.children:
        store.take(leaf, Unit.LEAF)
    cache_of(client).check_integrity()
    prompts = [base, longer, diverge(name, longer, 190, 10, seed=63)]
    assert_same(ask_all(client, prompts), cold(name, prompts))
    check_idle(client)
    check_warm(client, name, prompts, [200, 270, 200])  # what was evicted has been filled in


@pytest.mark.parametrize("name", ON_EITHER_BACKEND)
def test_with_the_replys_state_evicted(name: str) -> None:
    client = make_client(name)
    base = make_prompt(name, 130, seed=71)
    conversation = [*base, *ask_all(client, [base], max_tokens=6)[0].tokens]
    leaf = nodes_of(client, conversation)[-1]
    assert leaf.end == len(conversation)
    for index in (STATE, WINDOW):
        if leaf.payloads[index] is not None:
            cache_of(client).tree.drop(leaf, index)
    prompts = [diverge(name, conversation, len(conversation), n, seed=80 + n) for n in (1, 2, 3)]
    assert min(ask_warm(client, name, prompts)) >= 128 - most_recomputed(name)
