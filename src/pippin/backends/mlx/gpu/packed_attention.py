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

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.paths import MOST_SEGMENTS, PackedCall
from pippin.backends.mlx.device import gpu_cores
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

Kernel = Callable[..., list[mx.array]]


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
        shared = (
            dims[1] + 2
        )  # for each query and SIMD group: its sums, the highest score, the total

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


@cache
def _kernels() -> tuple[Kernel, Kernel]:
    """The first reads strides: a step's queries, keys and values are slices of one wide product,
    and to copy them in every layer would cost more."""
    make: Callable[..., Kernel] = mx.fast.metal_kernel  # type: ignore[assignment]
    attend = make(
        name="pippin_attend_packed",
        input_names=[
            *("q", "k", "v", "tail_k", "tail_v"),
            *(f"main_{side}{n}" for n in range(MOST_SEGMENTS) for side in "kv"),
            *("sizes", "places", "visible_tail", "cursor", "positions", "numbers", "sinks"),
        ],
        output_names=["out", "weights", "new_tail_k", "new_tail_v"],
        source=ATTEND,
        header=HEADER,
        ensure_row_contiguous=False,
    )
    add_up = make(
        name="pippin_add_up_stretches",
        input_names=["parts", "weights", "sinks"],
        output_names=["out"],
        source=ADD_UP,
    )
    return attend, add_up


def add_up_kernel() -> Kernel:
    """Adds the stretches of rows up."""
    return _kernels()[1]


@cache
def number(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


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
def no_columns(num_heads: int, dim: int, v_dim: int, dtype: mx.Dtype) -> list[mx.array]:
    """Stand for a segment that there is not."""
    columns = [mx.zeros((num_heads, 1, size), dtype) for size in (dim, v_dim)]
    mx.eval(columns)  # or every compiled step would make them again
    return columns


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
    q, v, tail, sinks = call.q, call.v, call.tail, call.sinks
    num_rows, num_query_heads, num_tokens, dim = q.shape
    num_heads, v_dim = v.shape[1], v.shape[3]
    form = Form.of(num_query_heads, num_heads, (dim, v_dim), q.dtype.size)
    num_blocks = num_rows * num_tokens * num_heads * form.shares
    num_splits, threads = cut(num_blocks, call.num_columns, form)
    whole = num_splits == 1
    attend, add_up = _kernels()
    rope = None if call.ropes is None else call.ropes[0]
    positions = call.cursor if call.positions is None else call.positions
    numbers = _numbers(call.scale, call.ropes)
    sizes = [("Dv", v_dim), ("Sinks", sinks is not None)]
    some_sinks = number(0.0) if sinks is None else sinks
    parts = (num_rows, num_query_heads, num_tokens)
    mains = [side for pair in call.mains for side in pair]
    mains += no_columns(num_heads, dim, v_dim, q.dtype) * (MOST_SEGMENTS - len(call.mains))
    out, weights, tail_k, tail_v = attend(
        inputs=[
            *(q, call.k, v, *tail, *mains, _sizes(tuple(keys.shape[1] for keys in mains[::2]))),
            *(call.places, call.visible_tail, call.cursor, positions, numbers, some_sinks),
        ],
        template=[
            ("T", q.dtype),
            ("O", q.dtype if whole else mx.float32),
            ("D", dim),
            *sizes,
            ("Threads", threads),
            ("Tail", call.visible_tail.shape[-1]),
            ("Queries", form.queries),
            ("Shares", form.shares),
            ("Lanes", form.lanes),
            ("Vec", form.vec),
            ("Ahead", AHEAD),
            ("Rotated", 0 if rope is None else rope.dims),
            ("Traditional", rope is not None and rope.traditional),
            ("Normed", rope is not None and rope.norm is not None),
            ("Whole", whole),
            ("Tokens", num_tokens),
            ("Cursors", call.cursor.size > 1),
        ],
        grid=(threads * num_splits, num_heads * form.shares, num_rows * num_tokens),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (*parts, v_dim) if whole else (*parts, num_splits, v_dim),
            (1,) if whole else (*parts, num_splits, 2),
            tail[0].shape,
            tail[1].shape,
        ],
        output_dtypes=[q.dtype if whole else mx.float32, mx.float32, q.dtype, q.dtype],
    )
    if not whole:
        (out,) = add_up(
            inputs=[out, weights, some_sinks],
            template=[("T", q.dtype), *sizes, ("Threads", FEWEST_THREADS)],
            grid=(FEWEST_THREADS * num_rows * num_query_heads * num_tokens, 1, 1),
            threadgroup=(FEWEST_THREADS, 1, 1),
            output_shapes=[(*parts, v_dim)],
            output_dtypes=[q.dtype],
        )
    return out, tail_k, tail_v
