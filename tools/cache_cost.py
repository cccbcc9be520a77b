"""What the prefix cache's operations cost the host, in a tree of many nodes.

    python tools/cache_cost.py [--nodes 100000] [--layout attention+state] [--rounds 100]

Payloads are numbers without arrays, so this times the tree alone. Each line is one operation:
the median and the worst of its rounds, in microseconds of this thread's own time on a CPU, without
Python's garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pippin.cache.prefix_cache import PrefixCache
from pippin.types import GRID, Component, Payload

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = {
    "attention": ((A,), 0),
    "attention+state": ((A, S), 0),
    "attention+window": ((A, W), 1024),
    "all": ((A, W, S), 1024),
}
TOKEN_BYTES = 100
STATE_BYTES = 12_800
SYSTEM_LEN = 512  # every conversation begins with the same tokens
CONVERSATION_LEN = 4096
LONG_LEN = 30_000
STEP_LEN = 512  # tokens that one step brings into the tree


@dataclass(frozen=True)
class Bytes:
    """A payload that is only a number of bytes."""

    num_tokens: int
    nbytes: int

    def split(self, at: int) -> tuple[Payload, Payload]:
        head = self.nbytes * at // self.num_tokens
        return Bytes(at, head), Bytes(self.num_tokens - at, self.nbytes - head)

    def release(self) -> None:
        pass

    def fingerprint(self) -> int:
        return 0


class Workload:
    """Conversations that share a system prompt, one long document, and a cache that holds them."""

    def __init__(self, layout: str, num_nodes: int) -> None:
        self.components, window = LAYOUTS[layout]
        self.cache = PrefixCache(self.components, window=window, capacity_bytes=1 << 60)
        self.rng = np.random.default_rng(0)
        self.choose = random.Random(0)
        self.system = self.tokens(SYSTEM_LEN)
        self.long = self.tokens(LONG_LEN)
        self.insert(self.long)
        self.conversations: list[np.ndarray] = []
        while self.cache.radix.num_nodes < num_nodes:
            self.conversations.append(self.conversation())
            self.insert(self.conversations[-1])

    @property
    def step_bytes(self) -> int:
        num_states = STEP_LEN // GRID if S in self.components else 0
        num_kv = sum(component is not S for component in self.components)
        return num_kv * STEP_LEN * TOKEN_BYTES + num_states * STATE_BYTES

    def tokens(self, length: int) -> np.ndarray:
        return self.rng.integers(0, 150_000, length, dtype=np.int32)

    def conversation(self) -> np.ndarray:
        return np.concatenate([self.system, self.tokens(CONVERSATION_LEN - SYSTEM_LEN)])

    def some_conversation(self) -> np.ndarray:
        return self.choose.choice(self.conversations)

    def insert(self, tokens: np.ndarray, step: int = GRID) -> None:
        for start in range(0, len(tokens), step):
            self.insert_step(tokens[: start + step], start)

    def insert_step(self, tokens: np.ndarray, start: int) -> None:
        length = len(tokens) - start
        kv = {c: Bytes(length, length * TOKEN_BYTES) for c in self.components if c is not S}
        grid = range(start - start % GRID + GRID, len(tokens) + 1, GRID)
        states = {end: Bytes(1, STATE_BYTES) for end in grid} if S in self.components else {}
        self.cache.insert(tokens, start, kv, states)


def measure(setup: Callable[[], Callable[[], object]], rounds: int) -> tuple[float, float]:
    """Median and worst microseconds of what `setup` returns, which is made anew each round."""
    times = []
    for _ in range(rounds):
        operation = setup()
        began = time.thread_time()
        operation()
        times.append((time.thread_time() - began) * 1e6)
    return statistics.median(times), max(times)


def operations(load: Workload) -> dict[str, Callable[[], Callable[[], object]]]:
    """By name: prepares one operation and returns it, ready to be timed."""
    cache, some, limit = load.cache, load.some_conversation, CONVERSATION_LEN - 1
    evict_step = partial(cache.evict, load.step_bytes)

    def lock_and_unlock(tokens: np.ndarray) -> Callable[[], object]:
        found = cache.match(tokens)
        return lambda: cache.unlock(cache.lock(found))

    def insert() -> Callable[[], object]:
        prompt = np.concatenate([some(), load.tokens(STEP_LEN)])
        return lambda: load.insert_step(prompt, len(prompt) - STEP_LEN)


    def evict_after_use() -> Callable[[], object]:
        for tokens in load.conversations:
            cache.match(tokens)
        return evict_step

    return {
        "probe, 4,096 tokens": lambda: partial(cache.probe, some(), limit=limit),
        "probe, 30,000 tokens": lambda: partial(cache.probe, load.long),
        "match, 4,096 tokens": lambda: partial(cache.match, some(), limit=limit),
        "match, 30,000 tokens": lambda: partial(cache.match, load.long),
        "lock and unlock, 4,096 tokens": lambda: lock_and_unlock(some()),
        "lock and unlock, 30,000 tokens": lambda: lock_and_unlock(load.long),
        "insert 512 tokens after 4,096": insert,
        "report": lambda: cache.report,
        "evict one thing": lambda: partial(cache.evict, 1),
        "evict what 512 tokens need": lambda: evict_step,
        "the same, all were used since": evict_after_use,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    gc.disable()
    for layout in options.layout or LAYOUTS:
        load = Workload(layout, options.nodes)
        print(f"\n{layout}, {load.cache.radix.num_nodes:,} nodes{'':10}  median us    worst us")
        for name, setup in operations(load).items():
            median, worst = measure(setup, options.rounds)
            print(f"  {name:40} {median:10,.0f}  {worst:10,.0f}", flush=True)


if __name__ == "__main__":
    main()
