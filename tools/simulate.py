"""Runs the engine in simulated worlds, one per seed, and stops at the first that goes wrong.

    python tools/simulate.py                       200,000 steps
    python tools/simulate.py --steps 5000000       more; from another --first seed
    python tools/simulate.py --seed 7              one world again

The worlds are in tests/simulator.py.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from simulator import World, simulate  # noqa: E402

STEPS_PER_WORLD = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200_000, help="steps in all")
    parser.add_argument("--first", type=int, default=0, help="the first world's seed")
    parser.add_argument("--seed", type=int, help="run this world alone")
    parser.add_argument("--length", type=int, default=STEPS_PER_WORLD, help="steps of a world")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # failed steps are what this is about
    if args.seed is not None:
        world = World(args.seed, args.length)
        print(world.setting)
        world.run()
        print(f"seed {args.seed}: {world.steps_run:,} steps, {len(world.asks)} requests, as it should be")
        return 0
    began, steps, seed = time.perf_counter(), 0, args.first
    while steps < args.steps:
        steps += simulate(seed, args.length)
        seed += 1
    seconds = time.perf_counter() - began
    print(f"seeds {args.first}..{seed - 1}: {steps:,} steps as they should be, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
