"""What top_k and top_p cost over a large vocabulary: the forms that sort and those that do not.

    python tools/filter_cost.py [--vocab 248320] [--rows 1 8 32]

Medians in milliseconds, for logits that are spread and for peaked ones. `step/filters.py` says
which form runs on which device; this is what says whether that is right there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import pippin.backends.mlx  # noqa: F401  (the fast BLAS, before mlx)

# isort: split
import mlx.core as mx

from pippin.backends.mlx.step import filters
from pippin.backends.mlx.step.largest import largest
from pippin.backends.mlx.step.sampler import send
from pippin.backends.sampling.batches import DrawGroup, SampleBatch
from pippin.backends.sampling.rules import SHORT, SlotSampling
from pippin.types import SamplingParams

REPEATS = 9
SCALES = {"spread": 2.0, "peaked": 8.0}


def milliseconds(work: Callable[[], mx.array]) -> float:
    mx.eval(work())
    taken = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        mx.eval(work())
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def group_of(params: SamplingParams, num_rows: int, vocab: int) -> DrawGroup[mx.array]:
    states = [SlotSampling(params)] * num_rows
    (group,) = SampleBatch(tuple(range(1, num_rows + 1)), states, (), vocab, send).draws
    return group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=248320)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    print(f"{arguments.vocab} tokens on {mx.default_device()}, milliseconds")
    for num_rows in arguments.rows:
        for name, scale in SCALES.items():
            x = mx.random.normal((num_rows, arguments.vocab)) * scale
            mx.eval(x)
            top_p = group_of(SamplingParams(top_p=0.95), num_rows, arguments.vocab)
            top_k = group_of(SamplingParams(top_k=1000, top_p=0.9), num_rows, arguments.vocab)
            times = {
                f"{SHORT} largest by partition": lambda x=x: mx.topk(x, SHORT, axis=-1),
                "by blocks": lambda x=x: largest(x, SHORT),
                "top_p by sort": lambda x=x, g=top_p: filters.dropped_by_sort(x, g),
                "by bisection": lambda x=x, g=top_p: filters.dropped_by_bisection(x, g),
                "top_k 1000 by sort": lambda x=x, g=top_k: filters.dropped_by_sort(x, g),
                "by bisection ": lambda x=x, g=top_k: filters.dropped_by_bisection(x, g),
            }
            costs = ", ".join(f"{what} {milliseconds(work):.2f}" for what, work in times.items())
            print(f"{num_rows} rows, {name}: {costs}", flush=True)


if __name__ == "__main__":
    main()
