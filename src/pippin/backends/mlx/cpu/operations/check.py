"""python -m pippin.backends.mlx.cpu.operations.check LIBRARY [NAME...]: does it work here?

Each operation but those named is computed once, on this CPU and with the mlx at hand, and compared
with mlx's own operations. That may crash, so it runs in a process of its own, and prints what it is
about to try and what became of it (library.py reads that):

    try rms_norm
    ok rms_norm
    try choose
    off choose: a token that the filters drop
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.cpu.operations.bindings import (
    LinearLayers,
    LinearWeights,
    Operations,
    without_operations,
)
from pippin.backends.mlx.cpu.operations.check_layers import (
    delta_layer,
    draft_head,
    normal,
)
from pippin.backends.mlx.cpu.operations.drop_ins import frequencies
from pippin.backends.mlx.cpu.operations.library import DOES_NOT_FIT
from pippin.backends.sampling.noise import gumbel, noise_keys, random_bits

TOLERANCE = 1e-4

NUM_THREADS = 2
SCALE = 0.3

Pairs = Iterable[tuple[mx.array, mx.array]]  # of ours and of what it should be


def finds_arrays(operations: Operations) -> bool:
    """Arrays as they come: made by Python, by an operation, of a view."""
    made = mx.arange(24, dtype=mx.float32).reshape(4, 6)
    arrays = [made, made + 1.0, mx.array([1.0, 2.0]), mx.split(made, 2, axis=0)[0]]
    mx.eval(arrays)
    return all(operations.is_array(x, np.asarray(x).ctypes.data) for x in arrays)


# ---- one trial for each operation, of sizes that several threads share -------------------------


def rms_norm(ours: Operations) -> Pairs:
    x, weight = normal(4, 50, 130).swapaxes(0, 1), normal(130, seed=1)
    yield ours.rms_norm(x * 2.0, weight, 1e-5) + 1.0, mx.fast.rms_norm(x * 2.0, weight, 1e-5) + 1.0
    yield ours.rms_norm(x[..., ::2], None, 1e-5), mx.fast.rms_norm(x[..., ::2], None, 1e-5)


def linear(ours: Operations) -> Pairs:
    x, bias = normal(3, 5, 96), normal(100, seed=1)
    for number, dtype in enumerate((mx.float32, mx.float16, mx.bfloat16)):
        weight = (normal(300, 96, seed=2 + number) * 0.1).astype(dtype).astype(mx.float32)
        two = (
            LinearWeights(ours.pack(weight), None, 300),
            LinearWeights(ours.pack(weight[:100]), bias, 100),
        )
        wide, narrow = ours.linear(x, LinearLayers(two))
        yield wide, x @ weight.T
        yield narrow, x @ weight[:100].T + bias


def swiglu(ours: Operations) -> Pairs:
    gate, x = normal(40, 500) * 10, normal(40, 500, seed=1)
    yield ours.swiglu(gate, x), gate * mx.sigmoid(gate) * x


def rope(ours: Operations) -> Pairs:
    x = normal(3, 9, 4, 64).swapaxes(1, 2)
    for offset in (100, mx.array([7, 0, 300])):
        theirs = mx.fast.rope(x, 32, traditional=False, base=10000.0, scale=0.5, offset=offset)
        yield ours.rope(x, frequencies(32, 10000.0), offset, 0.5), theirs


def attention(ours: Operations) -> Pairs:
    q, k, v = normal(2, 6, 40, 32), normal(2, 2, 100, 32, seed=1), normal(2, 2, 100, 48, seed=2)
    allowed = mx.random.uniform(shape=(2, 1, 40, 100), key=mx.random.key(3)) < 0.6
    allowed[..., 0] = True
    plain = mx.fast.scaled_dot_product_attention
    yield (
        ours.attention(q, k, v, SCALE, None, causal=True),
        plain(q, k, v, scale=SCALE, mask="causal"),
    )
    yield (
        ours.attention(q, k, v, SCALE, allowed, causal=False),
        plain(q, k, v, scale=SCALE, mask=allowed),
    )


def row_attention(ours: Operations) -> Pairs:
    """Three tokens of each row, over what the KV table has of it and its tail, where they go."""
    main = normal(2, 2, 30, 16), normal(2, 2, 30, 16, seed=1)
    sides = [mx.contiguous(mx.concatenate(list(side), axis=1)) for side in main]
    # One layer and one segment, of two rows of 30 columns, of which the second has 7.
    table = ours.kv_table(sides, [1, 1, 2, *(0, 0, 30, 1, 0), *(0, 30, 7, 1, 1), 1, 0])
    cursor, window = [3, 6], 9  # the last token has no place in the tail
    q, new = normal(2, 4, 3, 16, seed=2), [normal(2, 2, 3, 16, seed=3 + side) for side in (0, 1)]
    tail = [normal(2, 2, 8, 16, seed=5 + side) for side in (0, 1)]
    after = [mx.array(side) for side in tail]
    for side, columns in zip(after, new, strict=True):
        side[0, :, 3:6], side[1, :, 6:] = columns[0], columns[1, :, :2]
    mx.eval(tail, after)
    at = mx.array(cursor)
    *written, found = ours.row_attention(
        q, (tail[0], tail[1]), (new[0], new[1]), at, table, SCALE, place=0, window=window
    )
    yield from zip(written, after, strict=True)
    for row, token in np.ndindex(2, 2):
        one, count, end = slice(row, row + 1), (30, 7)[row], cursor[row] + token + 1
        keys, values = (
            mx.concatenate([side[one, :, :count], own[one, :, :end]], axis=2)[:, :, -window:]
            for side, own in zip(main, after, strict=True)
        )
        asking = q[one, :, token : token + 1]
        plain = mx.fast.scaled_dot_product_attention(asking, keys, values, scale=SCALE)
        yield found[one, :, token : token + 1], plain


def choose(ours: Operations) -> Pairs:
    """Greedy; noise alone; noise and each filter, over logits that no filter nearly keeps."""
    logits = np.where(np.arange(500) % 100 == 7, 20.0, np.linspace(0.0, 1.0, 500))
    rows = ((0.0, 0, np.inf, 0.0), (1.0, 0, np.inf, 0.0), (1.0, 5, np.inf, 0.0))
    choices = np.array([*rows, (1.0, 0, 0.9, 0.0), (1.0, 0, np.inf, 0.1)], np.float32)
    keys = noise_keys(np.full(5, 12345, np.uint64), range(5))
    x = np.tile(logits.astype(np.float32), (5, 1))
    x[0, 321], x[1] = 30.0, x[1] * 0.1  # a winner; and a row whose noise decides
    tokens = np.array(ours.choose(mx.array(x), mx.array(choices), mx.array(keys)))
    sums = x + gumbel(random_bits(keys, 500))
    sums[0] = x[0]
    sums[2:, x[0] < 20.0] = -np.inf
    found = np.take_along_axis(sums, tokens[:, None], axis=1)[:, 0]
    yield mx.array(found), mx.array(sums.max(axis=1))


TRIALS: tuple[Callable[[Operations], Pairs], ...] = (
    *(rms_norm, linear, swiglu, rope, attention, row_attention, delta_layer),
    *(draft_head, choose),
)


def error_of(trial: Callable[[Operations], Pairs], ours: Operations) -> str | None:
    try:
        errors = [_error(found, expected) for found, expected in trial(ours)]
    except (RuntimeError, ValueError) as error:  # as mlx raises them
        return str(error)
    if (failure := ours.take_failure()) is not None:
        return failure
    worst = float(np.max(errors))  # or what is no number
    return None if worst < TOLERANCE else f"its error is {worst:.0e}"


def _error(found: mx.array, expected: mx.array) -> float:
    if found.shape != expected.shape:
        raise ValueError(f"its shape is {found.shape} and not {expected.shape}")
    scale = mx.maximum(mx.abs(expected).max(), 1.0)
    return float(np.asarray(mx.abs(found - expected).max() / scale))


def main() -> int:
    mx.set_default_device(mx.Device(mx.cpu))
    path, *skipped = sys.argv[1:]
    ours = Operations(Path(path), NUM_THREADS)
    if not finds_arrays(ours):
        print("mlx's arrays are not where they are looked for", file=sys.stderr)
        return DOES_NOT_FIT
    for trial in TRIALS:
        name = trial.__name__
        if name in skipped:
            continue
        print("try", name, flush=True)
        with without_operations():  # what is compared with is mlx's own
            error = error_of(trial, ours)
        print("ok" if error is None else "off", name + (f": {error}" if error else ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
