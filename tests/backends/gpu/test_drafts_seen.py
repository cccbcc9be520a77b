"""Several tokens of each row over packed rows: the kernel and its plain form against numpy.

Rows are of different lengths, and each has its own cursor, as where drafts are verified.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from metal.emulator import needs_clang, use_emulator
from pippin.backends.mlx.attention.packed_rows import (
    MOST_SEGMENTS,
    AttendPacked,
    PackedCall,
    attend_joined,
    places_of_tokens,
    visible_to_tokens,
)
from pippin.backends.mlx.gpu.packed_attention import attend_packed

TAIL, HEADS, QUERY_HEADS, DIM = 64, 2, 4, 32
# Tokens of mains in two segments, and the tail's column of a row's first token: one has no place
# for all of its tokens, which are padding then.
ROWS = (((40, 3), 17), ((0, 0), 0), ((9, 0), 60), ((0, 50), 63), ((600, 20), 5))
WAYS = [
    pytest.param(attend_packed, id="kernel", marks=[needs_clang, pytest.mark.slow]),
    pytest.param(attend_joined, id="joined"),
]


@pytest.fixture(autouse=True)
def _metal(monkeypatch: pytest.MonkeyPatch) -> None:
    if not mx.metal.is_available():
        use_emulator(monkeypatch)


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("window", [None, 24, 64])
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("attend", WAYS)
def test_each_token_sees_what_is_before_it(
    attend: AttendPacked, num_tokens: int, window: int | None
) -> None:
    width = len(ROWS)
    q = normal(width, QUERY_HEADS, num_tokens, DIM, seed=0)
    new, tails = (
        normal(2, width, HEADS, num_tokens, DIM, seed=1),
        normal(2, width, HEADS, TAIL, DIM, seed=2),
    )
    sizes = [sum(lens[number] for lens, _ in ROWS) + 5 for number in (0, 1)]
    mains = [normal(2, HEADS, size, DIM, seed=3 + number) for number, size in enumerate(sizes)]
    places = np.zeros((width, MOST_SEGMENTS, 2), np.int32)
    for number in (0, 1):
        counts = [lens[number] for lens, _ in ROWS]
        places[:, number, 0] = 2 + np.cumsum([0, *counts[:-1]])
        places[:, number, 1] = counts
    cursor = mx.array([own for _, own in ROWS], mx.int32)
    columns = cursor[:, None] + mx.arange(num_tokens)
    out, *tail = attend(
        PackedCall(
            mx.array(q),
            mx.array(new[0]),
            mx.array(new[1]),
            (mx.array(tails[0]), mx.array(tails[1])),
            [(mx.array(main[0]), mx.array(main[1])) for main in mains],
            places_of_tokens(mx.array(places), columns, window),
            visible_to_tokens(columns, window, TAIL),
            cursor,
            DIM**-0.5,
            None,
            max(sum(lens) for lens, _ in ROWS),
        )
    )
    for row, (lens, at) in enumerate(ROWS):
        num_new = min(num_tokens, TAIL - at)
        held = [
            main[:, :, start : start + count]
            for main, (start, count) in zip(mains, places[row], strict=False)
        ]
        held += [tails[:, row, :, :at], new[:, row, :, :num_new]]
        keys, values = np.concatenate(held, axis=2).astype(np.float64)
        for token, head in np.ndindex(num_new, QUERY_HEADS):
            end = sum(lens) + at + token + 1
            seen = slice(max(end - (window or end), 0), end)
            own = head // (QUERY_HEADS // HEADS)
            weights = np.exp(keys[own, seen] @ q[row, head, token] * DIM**-0.5)
            expected = weights @ values[own, seen] / weights.sum()
            np.testing.assert_allclose(np.array(out)[row, head, token], expected, atol=2e-6)
        for side, old, given in zip(tail, tails, new, strict=True):
            wanted = old[row].copy()
            wanted[:, at : at + num_new] = given[row, :, :num_new]
            np.testing.assert_array_equal(np.array(side)[row], wanted)
