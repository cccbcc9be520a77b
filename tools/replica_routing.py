"""Share of prompt tokens that replicas restore, routed by prefix and in turn, beside one cache.

    python tools/replica_routing.py                    2 replicas, ample memory
    python tools/replica_routing.py --replicas 4 --memory-kb 12000
    python tools/replica_routing.py --memory-kb 4000 --bound

Schedulers and caches are real, the model is a toy (tests/replica_world.py). All caches of a row have
--memory-kb together.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean

sys.path[:0] = [str(Path(__file__).parent.parent / "tests")]

from replica_world import POLICIES, WORKLOADS, best_split, mean_hit_rate  # noqa: E402


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--memory-kb", type=int, default=1 << 20, help="of all caches together")
    parser.add_argument("--seeds", type=int, default=6, help="runs whose mean is printed")
    parser.add_argument("--bound", action="store_true", help="the best fixed split, tried for each run; minutes")
    args = parser.parse_args(arguments)
    columns = [*POLICIES, *(["best split"] if args.bound else [])]
    print(f"{'workload':<16}" + "".join(f"{column:>20}" for column in columns))
    for workload in WORKLOADS:
        rates = [
            mean_hit_rate(
                policy,
                workload,
                num_replicas=args.replicas,
                nbytes=args.memory_kb * 1000,
                seeds=range(args.seeds),
            )
            for policy in POLICIES
        ]
        if args.bound:
            each = {"num_replicas": args.replicas, "nbytes": args.memory_kb * 1000}
            rates.append(fmean(best_split(workload, **each, seed=seed) for seed in range(args.seeds)))
        shown = [f"{rate:.1%} ({rate / max(rates[0], 1e-9):.0%})" for rate in rates]
        print(f"{workload:<16}" + "".join(f"{each:>20}" for each in shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
