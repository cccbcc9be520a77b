"""Counts what Metal would be asked for in memory: shapes of steps, sizes of buffers.

    python tools/metal_memory.py

A load of requests that start and end all the time is run through packed rows, with one number a
column and no model: how many steps have a shape that none had before, which is what a compiled step
and every buffer of it depend on, and how many sizes of buffers rows ask for.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import pippin.backends.mlx  # noqa: E402  (before mlx)

# isort: split
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from pippin.backends.mlx.attention.packed_rows import AttentionPaths  # noqa: E402
from pippin.backends.mlx.attention.packed_rows import attend_joined  # noqa: E402
from pippin.backends.mlx.layout import LayerCache, Layout, Reads  # noqa: E402
from pippin.backends.mlx.prefill.batch import PromptState  # noqa: E402
from pippin.backends.mlx.rows.decode_forward import MAX_COMPILED  # noqa: E402
from pippin.backends.mlx.rows.decode_rows import DecodeRows  # noqa: E402
from pippin.types import Component  # noqa: E402

STEPS, REPLY_TOKENS, BUSY = 2000, 200, 0.9  # of a load; of a reply, on average; of the rows
HOUR = 100_000  # steps, of 36 ms
ATTENTION = LayerCache(0, Component.ATTENTION, None, ((1, 1),) * 2, (mx.float32,) * 2, Reads.PIECES)
LAYOUT = Layout((ATTENTION,), (0,))


class Load(NamedTuple):
    steps: int
    new_shapes: int  # steps with a shape that none had before
    traced: int  # steps with a shape that is not among the latest that are kept compiled
    sizes: int  # of rows' buffers
    buffers: int  # of rows, at most, a layer


def mixed_load(most_rows: int, num_steps: int = STEPS, seed: int = 0) -> Load:
    """Prompts of 4 to 16,000 tokens, half of them below 500."""
    rng = np.random.default_rng(seed)
    rows = DecodeRows(LAYOUT, AttentionPaths(attend_joined))
    left: dict[int, int] = {}  # tokens, by slot
    shapes: list[Any] = []
    sizes: set[tuple[int, ...]] = set()
    slot = buffers = 0

    def forward(shape: Any, tree: Any) -> Any:
        shapes.append(shape)
        return tree["tokens"], [tuple(tail) for tail in tree["tails"]], [], None

    for _ in range(num_steps):
        joining = []
        for _ in range(rng.poisson(BUSY * most_rows / REPLY_TOKENS)):
            if len(left) == most_rows:
                break
            slot += 1
            length = int(np.clip(rng.lognormal(6.2, 1.2), 4, 16_000))
            side = mx.zeros((1, 1, length, 1))
            joining.append((slot, PromptState(length, {0: (side, side)})))
            left[slot] = int(rng.geometric(1 / REPLY_TOKENS))
        rows.join(joining)
        if not left:
            continue
        rows.advance([*left], lambda at: mx.zeros(len(at), mx.int32), forward)
        mx.eval(rows.arrays())
        held = rows.arrays()
        sizes |= {tuple(array.shape) for array in held}
        buffers = max(buffers, len(held))
        for ended in [each for each, tokens in left.items() if tokens == 1]:
            del left[ended]
            rows.leave(ended)
        left = {each: tokens - 1 for each, tokens in left.items()}
    return Load(len(shapes), len(set(shapes)), _num_traced(shapes), len(sizes), buffers)


def _num_traced(shapes: Sequence[Any]) -> int:
    kept: OrderedDict[Any, None] = OrderedDict()
    traced = 0
    for shape in shapes:
        traced += shape not in kept
        kept[shape] = None
        kept.move_to_end(shape)
        if len(kept) > MAX_COMPILED:
            kept.popitem(last=False)
    return traced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"an hour has {HOUR:,}")
    args = parser.parse_args()
    loads = {rows: mixed_load(rows, args.steps)._asdict() for rows in args.rows}
    if args.json:
        print(json.dumps(loads))
        return
    for num_rows, load in loads.items():
        print(f"{num_rows} rows: " + ", ".join(f"{n:,} {what}" for what, n in load.items()))


if __name__ == "__main__":
    main()
