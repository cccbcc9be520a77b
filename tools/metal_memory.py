"""Counts what Metal would be asked for in memory: shapes of steps, sizes of buffers, whole pages.

    python tools/metal_memory.py

A load of requests that start and end all the time is run through packed rows, with one number a
column and no model: how many steps have a shape that none had before, which is what a compiled step
and every buffer of it depend on, and how many sizes of buffers rows ask for. And by the layouts of
known models: buffers, and bytes as mlx allocates them, in pages of 16 KiB.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import pippin.backends.mlx  # noqa: E402  (before mlx)

# isort: split
import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from pippin.backends.mlx.attention.paths import AttentionPaths  # noqa: E402
from pippin.backends.mlx.attention.plain_attention import attend_joined  # noqa: E402
from pippin.backends.mlx.layout import LayerCache, Layout, Reads  # noqa: E402
from pippin.backends.mlx.payloads.packing import Packer  # noqa: E402
from pippin.backends.mlx.prefill.batch import PromptState  # noqa: E402
from pippin.backends.mlx.rows.decode_forward import MAX_COMPILED  # noqa: E402
from pippin.backends.mlx.rows.decode_rows import DecodeRows  # noqa: E402
from pippin.types import GRID, Component  # noqa: E402

PAGE = 16_384
STEPS, REPLY_TOKENS, BUSY = 2000, 200, 0.9  # of a load; of a reply, on average; of the rows
HOUR = 100_000  # steps, of 36 ms
LAYOUT = Layout(
    (
        LayerCache(
            0, Component.ATTENTION, None, ((1, 1), (1, 1)), (mx.float32,) * 2, Reads.PIECES
        ),
    ),
    (0,),
)


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


def layout(
    attention: int,
    heads: int,
    dim: int,
    *,
    windowed: int = 0,
    window: int = 0,
    states: int = 0,
    delta: tuple[int, int] = (0, 0),
) -> Layout:
    """So many layers of each kind, bfloat16. `delta`: heads of keys and of values, of 128."""
    shapes = ((heads, dim),) * 2
    caches = [LayerCache(0, Component.ATTENTION, None, shapes, (mx.bfloat16,) * 2)] * attention
    caches += [LayerCache(0, Component.WINDOW, window, shapes, (mx.bfloat16,) * 2)] * windowed
    channels = 128 * (2 * delta[0] + delta[1])
    state = ((3, channels), (delta[1], 128, 128))
    caches += [LayerCache(0, Component.STATE, None, state, (mx.bfloat16, mx.float32))] * states
    return Layout(tuple(caches), (0,) * len(caches))


MODELS = {
    "Llama-3 8B": layout(32, 8, 128),
    "Qwen3 0.6B": layout(28, 8, 128),
    "Qwen3 235B-A22B": layout(94, 4, 128),
    "Qwen3.5 0.8B": layout(6, 2, 256, states=18, delta=(16, 16)),
    "Qwen3.5 397B-A17B": layout(15, 2, 256, states=45, delta=(16, 64)),
    "Gemma 3 27B": layout(10, 16, 128, windowed=52, window=1024),
    "gpt-oss 20B": layout(12, 8, 64, windowed=12, window=128),
}


def allocated(nbytes: int) -> int:
    """As mlx does on Metal: what is larger than a page has whole pages."""
    return nbytes if nbytes <= PAGE else -(-nbytes // PAGE) * PAGE


def block_buffers(model: Layout) -> list[int]:
    """Bytes of each buffer of a block of the tree: keys and values of layers that are alike."""
    return [
        len(group) * GRID * prod(shape) * dtype.size
        for groups in Packer(model).groups.values()
        for group in groups
        for shape, dtype in zip(
            model.caches[group[0]].shapes, model.caches[group[0]].dtypes, strict=True
        )
    ]


def state_buffers(model: Layout) -> list[int]:
    """Of a checkpoint's states."""
    caches = (model.caches[index] for index in model.state_indices)
    return [
        prod(shape) * dtype.size
        for own in caches
        for shape, dtype in zip(own.shapes, own.dtypes, strict=True)
    ]


def overhead(buffers: Iterable[int]) -> float:
    """What pages add, as a share."""
    sizes = list(buffers)
    return sum(map(allocated, sizes)) / sum(sizes) - 1 if sizes else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=STEPS, help=f"an hour has {HOUR:,}")
    args = parser.parse_args()
    loads = {rows: mixed_load(rows, args.steps)._asdict() for rows in args.rows}
    models = {}
    for name, model in MODELS.items():
        blocks, states = block_buffers(model), state_buffers(model)
        kinds = {"block": blocks, "states": states}
        models[name] = {
            kind: {"buffers": len(own), "bytes": sum(own), "overhead": overhead(own)}
            for kind, own in kinds.items()
        }
    if args.json:
        print(json.dumps({"loads": loads, "models": models}))
        return
    for num_rows, load in loads.items():
        print(f"{num_rows} rows: " + ", ".join(f"{n:,} {what}" for what, n in load.items()))
    for name, kinds in models.items():
        parts = [
            f"{kind}: {own['buffers']} buffers, {own['bytes'] / 2**20:.2f} MiB + {own['overhead']:.1%}"
            for kind, own in kinds.items()
            if own["buffers"]
        ]
        print(f"{name:<20}" + "; ".join(parts))


if __name__ == "__main__":
    main()
