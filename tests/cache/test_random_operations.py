"""Random operations on the tree with its components, compared with a naive model after each."""

from __future__ import annotations

import random

import pytest
from naive_cache import A, CheckedCache, H, S, W, with_salt

from integrity import sweep
from pippin.cache.tree.canary import Canary

LAYOUTS = {
    "attention": ((A, H), 0),
    "attention+window": ((A, W, H), 3),
    "attention+state": ((A, S, H), 0),
    "state": ((S, H), 0),
    "window": ((W, H), 4),
    "window+state": ((W, S, H), 3),
    "all": ((A, W, S, H), 5),
    "no hidden vectors": ((A, S), 0),
}
NUM_OPERATIONS = 600  # for each layout and pressure


def random_tokens(rng: random.Random) -> list[int]:
    """A piece of one of three conversations that share a beginning, and sometimes a new turn.

    Each of them under several salts.
    """
    shared = [position % 3 for position in range(10)]
    conversation = shared + [rng.randrange(3)] * 14
    tokens = conversation[: rng.randrange(1, len(conversation))]
    tokens += [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, 3]))]
    return with_salt(tokens, rng.choice([0, 0, 1, 2]))


def operate(checked: CheckedCache, rng: random.Random) -> None:
    """One operation as a scheduler would do it, or as badly as one could."""
    kind, tokens = rng.random(), random_tokens(rng)
    if kind < 0.20:
        checked.match(tokens, rng.choice([None, len(tokens) - 1]))
    elif kind < 0.30:
        checked.match_prompt(tokens)
    elif kind < 0.40 and len(checked.locks) < 4:
        checked.lock(tokens, rng.choice([None, len(tokens) - 1]))
    elif kind < 0.43 and len(checked.locks) < 4:
        checked.lock_prompt(tokens)
    elif kind < 0.50 and (checked.locks or checked.growing):
        checked.unlock(rng.randrange(8))
    elif kind < 0.90:
        start = rng.choice([0, checked.match(tokens).length, rng.randrange(len(tokens) + 1)])
        states = rng.sample(range(1, len(tokens) + 1), rng.randrange(min(3, len(tokens)) + 1))
        kv = rng.choice([None, None, None, [A], [W], []])
        result = checked.insert(tokens, start, states, kv, hidden=rng.random() < 0.5)
        if kind < 0.53 and len(checked.growing) < 3:
            checked.lock_inserted(tokens, result)
    elif kind < 0.95:
        checked.evict(rng.choice([1, 10, 40, 100]))
    elif kind < 0.955:
        checked.evict(1 << 40)
    elif kind < 0.965:
        capacity = checked.cache.capacity_bytes
        checked.set_capacity(rng.choice([0, 100, 400]))
        checked.insert(tokens, 0, [len(tokens)])
        checked.set_capacity(capacity)
    elif kind < 0.975:
        checked.begin_flush()
    else:
        checked.free_flushed(rng.choice([1, 2, 3, 3, 100]))


@pytest.mark.parametrize("capacity", [pytest.param(1 << 40, marks=pytest.mark.slow), 200])
@pytest.mark.parametrize(
    "layout",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "all"), "all"],
)
def test_thousands_of_random_operations_agree_with_the_naive_model(
    layout: str, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if capacity < 1 << 40:  # so that ends are often too far below a split
        monkeypatch.setattr("pippin.cache.tree.components.MAX_VISITS", 2)
    components, window = LAYOUTS[layout]
    canary = Canary("raise") if capacity < 1 << 40 else None
    checked = CheckedCache(components, window=window, capacity=capacity, canary=canary)
    rng = random.Random(f"{layout} {capacity}")
    for number in range(NUM_OPERATIONS):
        operate(checked, rng)
        checked.check()
        if number % 20 == 0:
            checked.check_by_evicting_a_copy()
            assert canary is None or sweep(checked.cache) == 0
    while checked.locks or checked.growing:
        checked.unlock(0)
    checked.flush()
    assert not checked.ledger.live
    assert checked.ledger.num_made > NUM_OPERATIONS / 4
