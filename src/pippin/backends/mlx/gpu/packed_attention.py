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
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, PackedCall
from pippin.backends.mlx.device import gpu_cores
from pippin.backends.mlx.gpu.kernels import Constants, run_kernel
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


# With the arrays whose ids are in the key, so that no others get these.
_numbers: dict[object, tuple[mx.array, list[mx.array]]] = {}


def _numbers_of(scale: float, ropes: tuple[Rope, ...]) -> mx.array:
    """What a kernel is given beside rows, made once for each layer: a compiled step would make it
    again. Scale, epsilons and gains of queries and of keys, angles, weights of norms. Eight at the
    least: Metal has fewer in another address space."""
    norms = [rope.norm for rope in ropes if rope.norm is not None]
    eps = [norm.eps for norm in norms] or [0.0, 0.0]
    gains = [rope.gain for rope in ropes] or [1.0, 1.0]
    arrays = [norm.weight for norm in norms]
    arrays += [rope.freqs for rope in ropes if rope.freqs is not None]
    rotations = ((rope.dims, rope.base, rope.scale) for rope in ropes)
    key = scale, *eps, *gains, *rotations, *map(id, arrays)
    if key not in _numbers:
        parts = [mx.array([scale, *eps, *gains, 0.0, 0.0, 0.0])]
        parts += [rope.angles() for rope in ropes[1:]]  # the same for both
        parts += [norm.weight.astype(mx.float32) for norm in norms]
        numbers = mx.concatenate(parts)
        mx.eval(numbers)
        if len(_numbers) >= MOST_REMEMBERED:
            _numbers.clear()
        _numbers[key] = numbers, arrays
    return _numbers[key][0]


@cache
def _sizes(columns: tuple[int, ...]) -> mx.array:
    """Of the segments: data, since a step's other constants are the same for all of them."""
    return mx.array(columns, dtype=mx.int32)


def _all_mains(call: PackedCall) -> list[mx.array]:
    """Keys and values of as many segments as the kernels have; tails stand for those that there are
    not, of which no row has columns."""
    mains = [*call.mains, *[call.tail] * (MOST_SEGMENTS - len(call.mains))]
    return [side for pair in mains for side in pair]


def cut(num_blocks: int, num_columns: int, form: Form) -> tuple[int, int]:
    """Into how many stretches a row's columns are cut, and how many threads take one.

    `num_blocks`: one for each row and key head; `num_columns`: of the longest row. A short row is
    one stretch, for as many threads as it can use: adding stretches up costs another launch.
    """
    if num_columns <= ROUNDS_OF_ONE_STRETCH * form.most_threads // form.lanes:
        return 1, form.most_threads
    return num_stretches(num_blocks, num_columns, BLOCKS_PER_CORE), FEWEST_THREADS


def num_stretches(num_blocks: int, num_columns: int, blocks_per_core: int) -> int:
    most = num_columns // SHORTEST_STRETCH
    return max(1, min(most, blocks_per_core * gpu_cores() // num_blocks))


def attend_packed(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    num_rows, num_query_heads, num_tokens, dim = call.q.shape
    num_heads, v_dim = call.v.shape[1], call.v.shape[3]
    form = Form.of(num_query_heads, num_heads, (dim, v_dim), call.q.dtype.size)
    blocks = num_heads * form.shares
    num_splits, threads = cut(num_rows * num_tokens * blocks, call.num_columns, form)
    columns = tuple(keys.shape[1] for keys, _ in call.mains)
    return run_stretches(
        *("pippin_attend_packed", ATTEND, call),
        {
            "v": call.v,
            "sizes": _sizes(columns + (1,) * (MOST_SEGMENTS - len(columns))),
            "sinks": call.sinks,
        },
        {
            "D": dim,
            "Dv": v_dim,
            "Sinks": call.sinks is not None,
            "Queries": form.queries,
            "Shares": form.shares,
            "Lanes": form.lanes,
            "Vec": form.vec,
            "Ahead": AHEAD,
            "Normed": call.ropes is not None and call.ropes[0].norm is not None,
            "Tokens": num_tokens,
        },
        blocks=blocks,
        num_splits=num_splits,
        threads=threads,
    )


def run_stretches(
    name: str,
    source: str,
    call: PackedCall,
    inputs: Mapping[str, mx.array | None],
    template: Constants,
    *,
    blocks: int,  # of threads, for a token
    num_splits: int,
    threads: int,  # of a block
) -> tuple[mx.array, mx.array, mx.array]:
    """What the queries read, and the rows' new tails: each row in so many stretches, which a second
    kernel adds up. `inputs`, `template`: beside those of both kernels."""
    q, parts = call.q, call.q.shape[:3]
    v_dim = (call.v if call.rotated is None else q).shape[-1]  # latents are values, too
    whole = num_splits == 1
    out_type = q.dtype if whole else mx.float32
    rope = None if call.ropes is None else call.ropes[1]  # queries are rotated as keys are
    tail_k, tail_v = call.tail
    out, weights, *new_tail = run_kernel(
        *(name, source),
        {
            "q": q,
            "k": call.k,
            "tail_k": tail_k,
            "tail_v": tail_v,
            **dict(zip(MAINS, _all_mains(call), strict=True)),
            "places": call.places,
            "visible_tail": call.visible_tail,
            "cursor": call.cursor,
            "positions": call.positions,
            "numbers": _numbers_of(call.scale, call.ropes or ()),
            **inputs,
        },
        {
            "out": ((*parts, v_dim) if whole else (*parts, num_splits, v_dim), out_type),
            "weights": ((1,) if whole else (*parts, num_splits, 2), mx.float32),
            "new_tail_k": (tail_k.shape, q.dtype),
            "new_tail_v": (tail_v.shape, q.dtype),
        },
        {
            "T": q.dtype,
            "O": out_type,
            "Threads": threads,
            "Whole": whole,
            "Tail": call.visible_tail.shape[-1],
            "Rotated": 0 if rope is None else rope.dims,
            "Traditional": rope is not None and rope.traditional,
            **template,
        },
        grid=(threads * num_splits, blocks, parts[0] * parts[2]),
        threads=threads,
        header=HEADER,
        strided=True,
    )
    if not whole:
        has_sinks = call.sinks is not None
        (out,) = run_kernel(
            *("pippin_add_up_stretches", ADD_UP),
            {"parts": out, "weights": weights, "sinks": call.sinks},
            {"out": ((*parts, v_dim), q.dtype)},
            {"T": q.dtype, "Dv": v_dim, "Sinks": has_sinks, "Threads": FEWEST_THREADS},
            grid=(FEWEST_THREADS * math.prod(parts), 1, 1),
            threads=FEWEST_THREADS,
        )
    return out, new_tail[0], new_tail[1]
