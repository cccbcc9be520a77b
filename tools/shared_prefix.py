"""Decode steps of rows that begin alike, with and without sharing, in turn in one process.

python tools/shared_prefix.py ROWS[,ROWS...] TOKENS[,TOKENS...]

Rows hold random keys and values: what a step costs does not depend on them. What is shared is read
for all rows at once whatever that saves, so that the table shows where it begins to pay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import pippin
from pippin.backends.mlx.rows import kv_table  # brings its BLAS: before mlx itself
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.load import load
from pippin.backends.mlx.prefill.batch import PromptState
from pippin.backends.mlx.rows.decode_rows import DecodeRows

import mlx.core as mx  # isort: skip

MODEL = Path(pippin.__file__).parent / "models" / "stories-hybrid-20m"
OWN_TOKENS = 24
WARM_STEPS = 12
BLOCKS, BLOCK_STEPS = 5, 8

loaded = load(MODEL, dtype="float32")
rng = np.random.default_rng(0)


def prompt_state(num_tokens: int) -> PromptState:
    state = PromptState(num_tokens)
    for index, cache in enumerate(loaded.layout.caches):
        if cache.is_state:
            pairs = zip(cache.shapes, cache.dtypes, strict=True)
            state.states[index] = [mx.zeros((1, *shape), dtype) for shape, dtype in pairs]
        else:
            keys, values = (
                mx.array(rng.standard_normal((1, heads, num_tokens, dim), dtype=np.float32))
                for heads, dim in cache.shapes
            )
            state.kv[index] = keys, values
    mx.eval(state.arrays())
    return state


def joined(num_rows: int, num_shared: int, *, shares: bool) -> DecodeRows:
    start = rng.integers(10, 8000, num_shared)
    prompts = {
        slot: np.concatenate([start, rng.integers(10, 8000, OWN_TOKENS)]).astype(np.int32)
        for slot in range(1, num_rows + 1)
    }
    rows = DecodeRows(loaded.layout)
    states = [(slot, prompt_state(num_shared + OWN_TOKENS)) for slot in prompts]
    rows.join(states, prompts if shares else None)
    return rows


def step_ms(rows: DecodeRows, forward: DecodeForward, num_steps: int) -> list[float]:
    taken = []
    for _ in range(num_steps):
        began = perf_counter()
        _, logits = rows.advance(
            list(rows.rows), lambda slots: mx.zeros(len(slots), mx.int32), forward
        )
        mx.eval(logits, rows.arrays())
        taken.append((perf_counter() - began) * 1e3)
    return taken


def compare(num_rows: int, num_shared: int) -> None:
    pair = [joined(num_rows, num_shared, shares=shares) for shares in (False, True)]
    forward = DecodeForward(loaded.layout, loaded.forward, compiled=True)
    for rows in pair:
        step_ms(rows, forward, WARM_STEPS)
    taken: list[list[float]] = [[], []]
    for _ in range(BLOCKS):
        for rows, times in zip(pair, taken, strict=True):
            times += step_ms(rows, forward, BLOCK_STEPS)
    apart, shared = median(taken[0]), median(taken[1])
    mib = [sum(array.nbytes for array in rows.mains.arrays()) / 2**20 for rows in pair]
    print(
        f"| {num_rows} | {num_shared:,} | {apart:.1f} | {shared:.1f} | {apart / shared:.2f}x "
        f"| {mib[0]:.1f} | {mib[1]:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    kv_table.SHARE_COST_TOKENS = 0
    print("| rows | shared tokens | apart, ms | shared, ms | | apart, MiB | shared, MiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    rows_wanted, tokens_wanted = ([int(n) for n in arg.split(",")] for arg in sys.argv[1:3])
    for num_rows in rows_wanted:
        for num_shared in tokens_wanted:
            compare(num_rows, num_shared)
