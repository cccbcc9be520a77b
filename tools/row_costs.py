"""Counts what requests that start and end cost rows: columns of KV that are copied.

    python tools/row_costs.py

Rows have one number a column; what counts are columns. Each request is `context` tokens long when
it joins and leaves 256 steps later; they join one after the other, evenly. A copy reads and writes
every column once; merging segments copies them twice.
"""

from __future__ import annotations

import argparse

import mlx.core as mx

from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.rows.footprint import Footprint, SpareLimit
from pippin.backends.mlx.rows.mains import Mains, Row
from pippin.types import Component

TAIL, STEPS_OF_A_REQUEST, NUM_STEPS = 64, 256, 2048
CACHE = LayerCache(
    0, Component.ATTENTION, None, ((1, 1), (1, 1)), (mx.float32, mx.float32), Reads.PIECES
)


def copied(num_rows: int, context: int) -> tuple[float, float, float]:
    """Columns copied in each step on average: by joins, by tails that are full; and held."""
    layout = Layout((CACHE,), (0,))
    mains = Mains(layout, SpareLimit(Footprint(layout)), AttentionPaths(attend_joined))
    rows: dict[int, Row] = {}
    counts = {"join": 0, "tail": 0}
    held = 0
    seen = {id(array): array for array in mains.arrays()}

    def count(what: str) -> None:
        for array in mains.arrays():
            if id(array) not in seen:
                seen[id(array)] = array
                counts[what] += array.shape[1]

    for step in range(NUM_STEPS):
        if any(row.num_tail == TAIL for row in rows.values()):
            tails = [mx.zeros((num_rows, 1, TAIL, 1))] * 2
            mains.absorb({0: tails})
            count("tail")
        for index in range(num_rows):
            if (step + index * STEPS_OF_A_REQUEST // num_rows) % STEPS_OF_A_REQUEST == 0:
                if index in rows:
                    mains.leave(rows.pop(index))
                row = rows[index] = Row(step, index, context)
                side = mx.zeros((1, 1, context, 1))
                mains.join([(row, {0: (side, side)})])
                count("join")
            if index in rows:
                rows[index].length += 1
        held += sum(row.length for row in rows.values())
    return counts["join"] / 2 / NUM_STEPS, counts["tail"] / 2 / NUM_STEPS, held / NUM_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096, 16_384])
    options = parser.parse_args()
    print("| rows | context | held | segments: joins | tails | all rewritten: joins | tails |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for num_rows in options.rows:
        for context in options.context:
            joins, tails, held = copied(num_rows, context)
            each = held * num_rows / STEPS_OF_A_REQUEST, held / TAIL
            found = (held, joins, tails, *each)
            print(f"| {num_rows} | {context:,} | " + " | ".join(f"{n:,.0f}" for n in found) + " |")


if __name__ == "__main__":
    main()
