"""Attention of a token of each row, or of several, over packed keys: one or two kernels.

    a segment of mains:   [ row 0's columns | row 3's columns | row 1's columns | ... ]
    one row's keys:       [ its columns of segment 0 | of segment 1 | ... | its line of the tails ]

Plain operations take a dozen launches for it, and with many layers a decode step on a GPU is all
launches. Here a block of threads takes a stretch of one row's columns for the queries of one key
head, and the one with the last stretch also writes the row's new tail. Where a row has several
stretches, a second kernel adds them up. Lengths and places are data: kernels know no shapes.
Drafts that are verified are tokens of a row too, each with what it sees.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, PackedCall
from pippin.backends.mlx.device import gpu_cores
from pippin.backends.mlx.gpu.kernels import Kernel, constants, metal_kernel
from pippin.backends.mlx.gpu.packed_kernels import ADD_UP, ATTEND, HEADER
from pippin.backends.mlx.layout import LayerCache

FEWEST_THREADS, MOST_THREADS = 128, 256  # of a threadgroup; not measured on Apple GPUs
# Numbers in threadgroup memory, where SIMD groups add up: Metal has 8,192. A key is there too.
MOST_SHARED = 8192 - 512
MOST_STATE = 64  # numbers of a lane: its share of the queries, and of the sums
# Threadgroups for each core of the GPU. A core has registers for some 500 threads of 64 numbers of
# state: four threadgroups, and as many again for cores that are done early. mlx's own attention in
# two passes takes 64 or 128 for each key head from M to Ultra: at 8 heads 13 to 26 a core.
BLOCKS_PER_CORE = 8
SHORTEST_STRETCH = 64  # columns
ROUNDS_OF_ONE_STRETCH = 16  # of a block over a row's columns, before these are cut
MOST_REMEMBERED = 1024  # layers, of all models
AHEAD = 2  # columns that a lane fetches before it looks at the first

MAINS = tuple(f"main_{side}{n}" for n in range(MOST_SEGMENTS) for side in "kv")
INPUTS = (
    *("q", "k", "v", "tail_k", "tail_v", *MAINS),
    *("sizes", "places", "visible_tail", "cursor", "positions", "numbers", "sinks"),
)
OUTPUTS = ("out", "weights", "new_tail_k", "new_tail_v")


@dataclass(frozen=True)
class Form:
    """How a kernel is cut for one shape of layer."""

    queries: int  # heads of queries that a block of threads serves
    shares: int  # blocks that share a key head
    lanes: int  # that share a column
    vec: int  # channels that are read at a time
    most_threads: int  # of a block

    @classmethod
    def of(cls, num_query_heads: int, num_heads: int, dims: tuple[int, int], size: int) -> Form:
        """`dims`: channels of a key and of a value; `size`: bytes of a number."""
        repeats = num_query_heads // num_heads
        # For each query and SIMD group: its sums, the highest score, the total.
        shared = dims[1] + 2

        def fits(n: int) -> bool:
            few = n * shared * FEWEST_THREADS // 32 <= MOST_SHARED
            return n == 1 or (few and n * sum(dims) <= 32 * MOST_STATE)

        queries = next(n for n in (8, 4, 2, 1) if repeats % n == 0 and fits(n))
        lanes = next((n for n in (8, 16) if queries * sum(dims) <= n * MOST_STATE), 32)
        vec = next(n for n in (8, 4, 2, 1) if n * size <= 16 and min(dims) // lanes % n == 0)
        threads = 32 << ((MOST_SHARED // (queries * shared)).bit_length() - 1)
        return cls(queries, repeats // queries, lanes, vec, min(threads, MOST_THREADS))


def takes(cache: LayerCache) -> bool:
    """Whether the kernel is for such a layer."""
    dims = [dim for _, dim in cache.shapes]
    whole = all(dim % 32 == 0 for dim in dims) and max(dims) % min(dims) == 0
    return whole and len(set(cache.dtypes)) == 1


def _numbers(scale: float, ropes: tuple[Rope, Rope] | None) -> mx.array:
    """Scale, epsilons, gain, angles and weights of norms."""
    parts = [] if ropes is None else [rope.norm for rope in ropes]
    arrays = [norm.weight for norm in parts if norm is not None]
    if ropes is not None and ropes[0].freqs is not None:
        arrays.append(ropes[0].freqs)
    gain = 1.0 if ropes is None else ropes[0].gain
    rotation = None if ropes is None else (ropes[0].dims, ropes[0].base, ropes[0].scale, gain)

    def make() -> list[mx.array]:
        eps = [0.0 if norm is None else norm.eps for norm in parts] or [0.0, 0.0]
        made = [mx.array([scale, *eps, gain, *[0.0] * 4])]
        made += [] if ropes is None else [ropes[0].angles()]
        return made + [norm.weight.astype(mx.float32) for norm in parts if norm is not None]

    return remembered_numbers(
        (scale, rotation, *(norm and norm.eps for norm in parts)), arrays, make
    )


def remembered_numbers(
    key: tuple[object, ...], arrays: list[mx.array], make: Callable[[], list[mx.array]]
) -> mx.array:
    """What a kernel is given beside rows, made once for each layer: a compiled step would make it
    again. `arrays`: that it is made of. Eight numbers at the least: Metal has fewer in another
    address space."""
    whole_key = key, tuple(map(id, arrays))
    if whole_key not in _made:
        numbers = mx.concatenate(make())
        mx.eval(numbers)
        if len(_made) >= MOST_REMEMBERED:
            _made.clear()
        _made[whole_key] = numbers, arrays
    return _made[whole_key][0]


# With the arrays whose ids are in the key, so that no others get these.
_made: dict[object, tuple[mx.array, list[mx.array]]] = {}


@cache
def _sizes(columns: tuple[int, ...]) -> mx.array:
    """Of the segments: data, since a step's other constants are the same for all of them."""
    return mx.array(columns, dtype=mx.int32)


@cache
def _no_columns(num_heads: int, dims: tuple[int, int], dtype: mx.Dtype) -> list[mx.array]:
    """Stand for a segment that there is not."""
    columns = [mx.zeros((num_heads, 1, dim), dtype) for dim in dims]
    mx.eval(columns)  # or every compiled step would make them again
    return columns


def all_mains(call: PackedCall) -> list[mx.array]:
    """Keys and values of as many segments as the kernels have."""
    keys, values = call.tail
    none = _no_columns(keys.shape[1], (keys.shape[3], values.shape[3]), call.q.dtype)
    mains = [side for pair in call.mains for side in pair]
    return mains + none * (MOST_SEGMENTS - len(call.mains))


def cut(num_blocks: int, num_columns: int, form: Form) -> tuple[int, int]:
    """Into how many stretches a row's columns are cut, and how many threads take one.

    `num_blocks`: one for each row and key head; `num_columns`: of the longest row. A short row is
    one stretch, for as many threads as it can use: adding stretches up costs another launch.
    """
    if num_columns <= ROUNDS_OF_ONE_STRETCH * form.most_threads // form.lanes:
        return 1, form.most_threads
    most = num_columns // SHORTEST_STRETCH
    wanted = BLOCKS_PER_CORE * gpu_cores()
    return max(1, min(most, wanted // num_blocks)), FEWEST_THREADS


def attend_packed(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    q, tail, sinks = call.q, call.tail, call.sinks
    num_rows, num_query_heads, num_tokens, dim = q.shape
    num_heads, v_dim = call.v.shape[1], call.v.shape[3]
    form = Form.of(num_query_heads, num_heads, (dim, v_dim), q.dtype.size)
    blocks = num_heads * form.shares
    num_splits, threads = cut(num_rows * num_tokens * blocks, call.num_columns, form)
    rope = None if call.ropes is None else call.ropes[0]
    positions = call.cursor if call.positions is None else call.positions
    numbers = _numbers(call.scale, call.ropes)
    mains = all_mains(call)
    sizes = _sizes(tuple(keys.shape[1] for keys in mains[::2]))
    return run_stretches(
        metal_kernel("pippin_attend_packed", INPUTS, OUTPUTS, ATTEND, header=HEADER, strided=True),
        call,
        inputs=[
            *(q, call.k, call.v, *tail, *mains, sizes, call.places, call.visible_tail),
            *(call.cursor, positions, numbers, constants(0.0) if sinks is None else sinks),
        ],
        template=[
            *(("D", dim), ("Dv", v_dim), ("Sinks", sinks is not None)),
            *(("Queries", form.queries), ("Shares", form.shares), ("Lanes", form.lanes)),
            *(("Vec", form.vec), ("Ahead", AHEAD), *rotation(rope)),
            ("Normed", rope is not None and rope.norm is not None),
            ("Tokens", num_tokens),
        ],
        blocks=blocks,
        num_splits=num_splits,
        threads=threads,
    )


def rotation(rope: Rope | None) -> list[tuple[str, int]]:
    """The constants of how queries and keys are rotated."""
    if rope is None:
        return [("Rotated", 0), ("Traditional", False)]
    return [("Rotated", rope.dims), ("Traditional", rope.traditional)]


def run_stretches(
    attend: Kernel,
    call: PackedCall,
    inputs: list[mx.array],
    template: list[tuple[str, Any]],
    *,
    blocks: int,  # of threads, for a token
    num_splits: int,
    threads: int,  # of a block
) -> tuple[mx.array, mx.array, mx.array]:
    """What the queries read, and the rows' new tails: each row in so many stretches, which a second
    kernel adds up."""
    q, sinks = call.q, call.sinks
    v_dim = (call.v if call.rotated is None else q).shape[-1]  # latents are values, too
    whole = num_splits == 1
    parts = q.shape[:3]
    out_type = q.dtype if whole else mx.float32
    out, weights, *new_tail = attend(
        inputs=inputs,
        template=[
            *(("T", q.dtype), ("O", out_type), ("Threads", threads), ("Whole", whole)),
            *(("Tail", call.visible_tail.shape[-1]), *template),
        ],
        grid=(threads * num_splits, blocks, parts[0] * parts[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (*parts, v_dim) if whole else (*parts, num_splits, v_dim),
            (1,) if whole else (*parts, num_splits, 2),
            *(side.shape for side in call.tail),
        ],
        output_dtypes=[out_type, mx.float32, q.dtype, q.dtype],
    )
    if not whole:
        names = ("parts", "weights", "sinks")
        (out,) = metal_kernel("pippin_add_up_stretches", names, ("out",), ADD_UP)(
            inputs=[out, weights, constants(0.0) if sinks is None else sinks],
            template=[
                *(("T", q.dtype), ("Dv", v_dim), ("Sinks", sinks is not None)),
                ("Threads", FEWEST_THREADS),
            ],
            grid=(FEWEST_THREADS * math.prod(parts), 1, 1),
            threadgroup=(FEWEST_THREADS, 1, 1),
            output_shapes=[(*parts, v_dim)],
            output_dtypes=[q.dtype],
        )
    return out, new_tail[0], new_tail[1]
