"""Runs the engine in simulated worlds, one per seed, and stops at the first failure.

    python tools/simulate.py                       200,000 steps
    python tools/simulate.py --steps 5000000       more; from another --first seed
    python tools/simulate.py --seed 7              one world again
    python tools/simulate.py --peers               prompts are computed by another engine, over a bad wire
    python tools/simulate.py --steps 0             only what comes last, see below

The worlds are in tests/simulator.py. At the end a tier of --tier-nodes nodes loses segment after segment
while streams run (tests/evicted_segments.py): prints how much of a step that takes; less than 1 ms is meant.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from evicted_segments import EvictedSegments, percentiles  # noqa: E402
from peer_world import PeerWorld, simulate_peers  # noqa: E402
from simulator import World, simulate  # noqa: E402

STEPS_PER_WORLD = 400
NUM_SEGMENTS = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000, help="steps in all")
    parser.add_argument("--first", type=int, default=0, help="the first world's seed")
    parser.add_argument("--seed", type=int, help="run this world alone")
    parser.add_argument("--tier-nodes", type=int, default=100_000, help="0: not at all")
    parser.add_argument("--length", type=int, default=STEPS_PER_WORLD, help="steps of a world")
    parser.add_argument("--peers", action="store_true", help="worlds with a prefill engine and a wire")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # failed steps are what this is about
    if args.seed is not None:
        world = (PeerWorld if args.peers else World)(args.seed, args.length)
        print(world.setting)
        world.run()
        print(f"seed {args.seed}: {world.steps_run:,} steps, {len(world.asks)} requests, as it should be")
        return 0
    began, steps, seed = time.perf_counter(), 0, args.first
    while steps < args.steps:
        steps += (simulate_peers if args.peers else simulate)(seed, args.length)
        seed += 1
    seconds = time.perf_counter() - began
    if steps:
        print(f"seeds {args.first}..{seed - 1}: {steps:,} steps as they should be, {seconds:.0f} s")
    if args.tier_nodes:
        evict_segments(args.tier_nodes)
    return 0


def evict_segments(num_nodes: int) -> None:
    world = EvictedSegments(num_nodes)
    spent: list[float] = []

    def measure(work: Callable[[], object]) -> None:
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)

    tier = world.flow.tiers
    before, entries = tier.cache.radix.num_nodes, len(tier._owned)
    steps = world.run(NUM_SEGMENTS, measure)
    after = tier.cache.radix.num_nodes
    print(
        f"a tier of {before:,} nodes and {entries:,} entries loses {NUM_SEGMENTS} segments of 16: "
        f"{before - after:,} nodes removed in {steps:,} steps; a step's share: {percentiles(spent)}"
    )


if __name__ == "__main__":
    sys.exit(main())
