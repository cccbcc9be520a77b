"""Which way a layer attends in a decode step, by what each way takes on this device.

    kernel   over mains where they lie, in one or two launches (gpu/packed_attention.py)
    joined   main and tail as one array, for mlx's fused attention; copies KV in every step

Knows no rows and times nothing (gpu/attention_times.py does). Which way it is depends on shapes
alone, so that steps of equal shape stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log2
from typing import NamedTuple

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import HeadNorms, Rope
from pippin.backends.mlx.payloads.packing import KV

WORTHWHILE = 0.95  # of the time of the way that is taken unless another is faster
MOST_SEGMENTS = 4  # of the mains of packed rows: a kernel has an argument for each
MOST_JOINED_BYTES = 128 << 20  # of one layer's copy


@dataclass(frozen=True)
class PackedCall:
    """What a layer asks of packed rows in one step."""

    q: mx.array  # [rows, query heads, tokens, D]
    k: mx.array  # [rows, heads, tokens, D]: this step's
    v: mx.array  # [rows, heads, tokens, Dv]
    tail: KV  # [rows, heads, TAIL, D or Dv]
    mains: Sequence[KV]  # by segment: [heads, columns, D or Dv]
    # Of each row, and of each of its tokens where there are several:
    places: mx.array  # int32 [.., segments, 2]: where its columns begin, and how many it sees
    visible_tail: mx.array  # bool [.., TAIL]
    cursor: mx.array  # int32 [rows]: the tail column of the first token
    scale: float
    sinks: mx.array | None
    num_columns: int  # of the longest row, or more
    positions: mx.array | None = None  # int32 [rows]: where each row's token stands
    ropes: tuple[Rope, Rope] | None = None  # what is yet to be done to `q` and to `k`
    # Of latents, [rows, query heads, 1, R]: scaled queries of the rotated keys. `k` are then
    # latents, keys and values at once, `v` rotated keys; `ropes` are of these two.
    rotated: mx.array | None = None


# What the rows attend to, [rows, query heads, tokens, Dv], and the new tails.
AttendPacked = Callable[[PackedCall], tuple[mx.array, mx.array, mx.array]]


class Path(StrEnum):
    KERNEL = "kernel"
    JOINED = "joined"


class Size(NamedTuple):
    num_rows: int
    num_columns: int  # of each row


PathTimes = Mapping[Size, Mapping[Path, float]]  # milliseconds of a layer


@dataclass(frozen=True, eq=False)
class AttentionPaths:
    """Without a kernel rows are joined, or an operation reads them by a table."""

    kernel: AttendPacked | None = None
    times: Mapping[str, PathTimes] = field(default_factory=dict)  # by kind of layer
    # Rotations are left to attention over packed rows, with these norms before them.
    norms: HeadNorms | None = None
    adds_later: bool = False  # a layer's sums are left to the norms that follow

    def of_packed(self, call: PackedCall) -> Path:
        """The kernel reads what rows hold. To join them is to pad them to the longest. In doubt it
        is the kernel."""
        num_rows, all_columns = call.q.shape[0], sum(keys.shape[1] for keys, _ in call.mains)
        joined = Size(num_rows, call.num_columns)
        times = self.times.get(kind_of(call.q, call.tail, call.sinks), {})
        by_kernel = _milliseconds(times, Path.KERNEL, Size(num_rows, -(-all_columns // num_rows)))
        by_join = _milliseconds(times, Path.JOINED, joined)
        if by_kernel is None or by_join is None or not can_join(joined, _token_bytes(call.tail)):
            return Path.KERNEL
        return Path.JOINED if by_join <= WORTHWHILE * by_kernel else Path.KERNEL


def can_join(size: Size, token_bytes: int) -> bool:
    return size.num_rows * size.num_columns * token_bytes <= MOST_JOINED_BYTES


def kind_of(queries: mx.array, main: KV, sinks: mx.array | None) -> str:
    """All that a layer's times depend on but for its rows and columns."""
    heads, dim = main[0].shape[-3], main[0].shape[-1]
    values = main[1].shape[-1]
    dtype = str(queries.dtype).removeprefix("mlx.core.")
    return f"{queries.shape[1]} over {heads} heads of {dim} and {values}, {dtype}" + (
        "" if sinks is None else ", sinks"
    )


def _milliseconds(times: PathTimes, path: Path, size: Size) -> float | None:
    """Of the nearest size that was timed; what is larger takes longer by as much."""
    timed = [known for known, ms in times.items() if path in ms]
    if not timed:
        return None
    nearest = min(timed, key=lambda known: _distance(known, size))
    growth = max(size.num_rows * size.num_columns / (nearest.num_rows * nearest.num_columns), 1.0)
    return times[nearest][path] * growth


def _distance(a: Size, b: Size) -> float:
    """In doublings."""
    return sum(abs(log2(max(m, 1) / max(n, 1))) for m, n in zip(a, b, strict=True))


def _token_bytes(main: KV) -> int:
    return sum(side.shape[-3] * side.shape[-1] * side.dtype.size for side in main)
