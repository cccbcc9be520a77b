"""Which way a layer attends: by the times of the nearest size, and the usual one when in doubt."""

from __future__ import annotations

import mlx.core as mx
import pytest

from pippin.backends.mlx.attention.paths import (
    MOST_JOINED_BYTES,
    AttentionPaths,
    PackedCall,
    Path,
    PathTimes,
    Size,
    kind_of,
)
from pippin.backends.mlx.attention.plain_attention import attend_joined
from pippin.backends.mlx.payloads.packing import KV

HEADS, DIM = 2, 16
TOKEN_BYTES = 2 * HEADS * DIM * 4
KERNEL, JOINED = Path
LIKE_AN_H200: PathTimes = {
    Size(1, 512): {KERNEL: 0.04, JOINED: 0.02},
    Size(1, 4096): {KERNEL: 0.06, JOINED: 0.08},
    Size(16, 512): {KERNEL: 0.05, JOINED: 0.4},
}


def queries(num_rows: int) -> mx.array:
    return mx.zeros((num_rows, 4, 1, DIM))


def packed_main(num_columns: int) -> KV:
    side = mx.zeros((HEADS, num_columns, DIM))
    return side, side


def paths(times: PathTimes) -> AttentionPaths:
    return AttentionPaths(attend_joined, {kind_of(queries(1), packed_main(1), None): times})


def of_packed(times: PathTimes, lengths: list[int]) -> Path:
    q, unused = queries(len(lengths)), mx.zeros(1)
    call = PackedCall(
        *(q, q, q, packed_main(1), [packed_main(n) for n in lengths], unused, unused, unused),
        scale=1.0,
        sinks=None,
        num_columns=max(lengths),
    )
    return paths(times).of_packed(call)


def test_untimed_it_is_the_kernel() -> None:
    assert of_packed({}, [100]) is KERNEL


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([512], JOINED),
        ([700], JOINED),
        ([20], JOINED),
        ([4096], KERNEL),
        ([3000], KERNEL),
        ([512] * 16, KERNEL),
        ([512] * 9, KERNEL),
    ],
)
def test_the_nearest_size_counts(lengths: list[int], expected: Path) -> None:
    assert of_packed(LIKE_AN_H200, lengths) is expected


def test_rows_that_are_joined_cost_as_much_as_the_longest() -> None:
    times: PathTimes = {Size(4, 512): {KERNEL: 1.0, JOINED: 0.7}}
    assert of_packed(times, [512] * 4) is JOINED
    assert of_packed(times, [8192] * 4) is JOINED
    assert of_packed(times, [100, 100, 100, 8192]) is KERNEL


def test_in_doubt_it_is_the_usual_way() -> None:
    assert of_packed({Size(1, 512): {KERNEL: 1.0, JOINED: 0.97}}, [512]) is KERNEL
    assert of_packed({Size(1, 512): {JOINED: 0.1}}, [512]) is KERNEL


def test_more_than_so_much_is_never_copied() -> None:
    times: PathTimes = {Size(1, 512): {KERNEL: 9.0, JOINED: 0.1}}
    most = MOST_JOINED_BYTES // TOKEN_BYTES
    assert of_packed(times, [most]) is JOINED
    assert of_packed(times, [most + 1]) is KERNEL


def test_other_shapes_and_types_have_times_of_their_own() -> None:
    kind = kind_of(queries(1), packed_main(1), None)
    assert kind == "4 over 2 heads of 16 and 16, float32"
    side = mx.zeros((3, HEADS, 7, DIM))
    assert kind_of(queries(3), (side, side), None) == kind
    half = queries(1).astype(mx.float16)
    assert kind_of(half, packed_main(1), None) != kind
    assert kind_of(queries(1), packed_main(1), mx.zeros(4)) != kind
