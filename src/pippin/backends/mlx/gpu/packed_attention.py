"""Attention of one token per row over keys that lie packed, as one or two kernels.

    mains, of all rows:   [ row 0's columns | row 3's columns | row 1's columns | ... ]
    one row's keys:       [ its columns there | its line of the tails ]

Plain operations take a dozen launches for it, and with many layers a decode step on a GPU is all
launches. Here a block of threads takes a stretch of one row's columns for the queries of one key
head, and whoever has the last stretch also writes the row's new tail. Where a row has several
stretches, a second kernel adds them up. Lengths and places are data: kernels know no shapes.

One source for CUDA and Metal; what their dialects call differently is defined before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import mlx.core as mx

from pippin.backends.mlx.layout import Layout, Leaf, Reads
from pippin.backends.mlx.rows.packed_views import AttendPacked

Dialect = Literal["cuda", "metal"]

FEWEST_THREADS, MOST_THREADS = 128, 512
MOST_SHARED = 8192  # numbers of a block of threads, where its warps add up
MOST_REGISTERS = 64  # of a lane, for its share of the queries and as many for its sums
WANTED_BLOCKS = 528  # about: four for each multiprocessor of a large GPU
SHORTEST_STRETCH = 64  # columns
ROUNDS_OF_ONE_STRETCH = 16  # of a block over a row's columns, before these are cut
AHEAD = 2  # columns that a lane fetches before it looks at the first

_DIALECTS: dict[Dialect, str] = {
    "cuda": """
#define PLACE_X blockIdx.x
#define PLACE_Y blockIdx.y
#define PLACE_Z blockIdx.z
#define NUM_X gridDim.x
#define THREAD threadIdx.x
#define TOGETHER __shared__
#define GLOBAL
#define SYNC() __syncthreads()
#define FROM_LANE(value, distance) __shfl_xor_sync(~0u, value, distance)
#define EXP(value) expf(value)
#define UNROLL _Pragma("unroll")
""",
    "metal": """
#define PLACE_X threadgroup_position_in_grid.x
#define PLACE_Y threadgroup_position_in_grid.y
#define PLACE_Z threadgroup_position_in_grid.z
#define NUM_X threadgroups_per_grid.x
#define THREAD thread_position_in_threadgroup.x
#define TOGETHER threadgroup
#define GLOBAL device
#define SYNC() threadgroup_barrier(mem_flags::mem_threadgroup)
#define FROM_LANE(value, distance) simd_shuffle_xor(value, distance)
#define EXP(value) metal::exp(value)
#define UNROLL _Pragma("unroll")
""",
}

_ATTEND = """
    constexpr int PER_LANE = D / Lanes;
    constexpr int PER_LANE_V = Dv / Lanes;
    constexpr int GROUPS = Threads / Lanes;  // each takes one column at a time
    constexpr int WARPS = Threads / 32;
    constexpr float LEAST = -1e30f;
    struct alignas(sizeof(T) * Vec) Chunk { T at[Vec]; };
    const int me = THREAD;  // (`me` is a keyword of Metal)
    const int lane = me % Lanes;
    const int group = me / Lanes;
    const int split = PLACE_X;
    const int num_splits = NUM_X;
    const int head = PLACE_Y / Shares;             // of the keys
    const int first_query = PLACE_Y * Queries;     // head of the queries
    const int row = PLACE_Z;
    const int num_query_heads = q_shape[1];
    const int num_heads = k_shape[1];

    const int start = places[2 * row];             // this row's columns among the mains
    const int num_main = places[2 * row + 1];
    const int num_columns = num_main + Tail;
    const int per_split = (num_columns + num_splits - 1) / num_splits;
    const int begin = split * per_split;
    const int end = begin + per_split < num_columns ? begin + per_split : num_columns;
    const int now = cursor[0];

    const GLOBAL T* new_key = k + row * k_strides[0] + head * k_strides[1];
    const GLOBAL T* new_value = v + row * v_strides[0] + head * v_strides[1];
    const GLOBAL T* main_keys = main_k + (head * static_cast<size_t>(main_k_shape[1]) + start) * D;
    const GLOBAL T* main_values =
        main_v + (head * static_cast<size_t>(main_v_shape[1]) + start) * Dv;
    const size_t tail_at = (static_cast<size_t>(row) * num_heads + head) * Tail;

    // A lane's channels: Vec of them side by side, then as many after those of the other lanes.
    float query[Queries][PER_LANE];
    float sum[Queries][PER_LANE_V];
    float top[Queries], total[Queries];
    UNROLL
    for (int n = 0; n < Queries; ++n) {
      const GLOBAL T* own = q + row * q_strides[0] + (first_query + n) * q_strides[1];
      UNROLL
      for (int i = 0; i < PER_LANE; ++i)
        query[n][i] = static_cast<float>(own[(i / Vec) * Vec * Lanes + lane * Vec + i % Vec])
            * scale[0];
      UNROLL
      for (int i = 0; i < PER_LANE_V; ++i) sum[n][i] = 0.0f;
      top[n] = LEAST;
      total[n] = 0.0f;
    }

    for (int from = begin; from < end; from += Ahead * GROUPS) {
      // Fetch the columns of a few rounds first: memory is far away.
      Chunk keys[Ahead][PER_LANE / Vec], values[Ahead][PER_LANE_V / Vec];
      bool visible[Ahead];
      UNROLL
      for (int a = 0; a < Ahead; ++a) {
        const int column = from + a * GROUPS + group;
        visible[a] = column < end
            && (column < num_main || visible_tail[row * Tail + column - num_main]);
        const int safe = visible[a] ? column : begin;
        const int in_tail = safe - num_main;
        const GLOBAL T* key = in_tail < 0 ? main_keys + static_cast<size_t>(safe) * D
            : in_tail == now ? new_key : tail_k + (tail_at + in_tail) * D;
        const GLOBAL T* value = in_tail < 0 ? main_values + static_cast<size_t>(safe) * Dv
            : in_tail == now ? new_value : tail_v + (tail_at + in_tail) * Dv;
        UNROLL
        for (int i = 0; i < PER_LANE / Vec; ++i)
          keys[a][i] = *reinterpret_cast<const GLOBAL Chunk*>(key + (i * Lanes + lane) * Vec);
        UNROLL
        for (int i = 0; i < PER_LANE_V / Vec; ++i)
          values[a][i] = *reinterpret_cast<const GLOBAL Chunk*>(value + (i * Lanes + lane) * Vec);
      }
      UNROLL
      for (int a = 0; a < Ahead; ++a) {
        float score[Queries];
        UNROLL
        for (int n = 0; n < Queries; ++n) {
          score[n] = 0.0f;
          UNROLL
          for (int i = 0; i < PER_LANE; ++i)
            score[n] += query[n][i] * static_cast<float>(keys[a][i / Vec].at[i % Vec]);
          UNROLL
          for (int step = Lanes / 2; step > 0; step /= 2) score[n] += FROM_LANE(score[n], step);
          const float higher = visible[a] && score[n] > top[n] ? score[n] : top[n];
          const float fade = EXP(top[n] - higher);
          score[n] = visible[a] ? EXP(score[n] - higher) : 0.0f;
          top[n] = higher;
          total[n] = total[n] * fade + score[n];
          UNROLL
          for (int i = 0; i < PER_LANE_V; ++i) sum[n][i] *= fade;
        }
        if (!visible[a]) continue;  // what is there weighs nothing, but nothing times inf does not
        UNROLL
        for (int n = 0; n < Queries; ++n)
          UNROLL
          for (int i = 0; i < PER_LANE_V; ++i)
            sum[n][i] += score[n] * static_cast<float>(values[a][i / Vec].at[i % Vec]);
      }
    }

    // Add up: the groups of a warp, then the warps.
    for (int distance = Lanes; distance < 32; distance *= 2) {
      UNROLL
      for (int n = 0; n < Queries; ++n) {
        const float other = FROM_LANE(top[n], distance);
        const float higher = top[n] > other ? top[n] : other;
        const float fade = EXP(top[n] - higher);
        const float other_fade = EXP(other - higher);
        const float other_total = FROM_LANE(total[n], distance);
        total[n] = total[n] * fade + other_total * other_fade;
        UNROLL
        for (int i = 0; i < PER_LANE_V; ++i) {
          const float other_sum = FROM_LANE(sum[n][i], distance);
          sum[n][i] = sum[n][i] * fade + other_sum * other_fade;
        }
        top[n] = higher;
      }
    }
    TOGETHER float tops[WARPS][Queries], totals[WARPS][Queries], sums[WARPS][Queries][Dv];
    if (me % 32 < Lanes) {
      const int warp = me / 32;
      UNROLL
      for (int n = 0; n < Queries; ++n) {
        UNROLL
        for (int i = 0; i < PER_LANE_V; ++i)
          sums[warp][n][(i / Vec) * Vec * Lanes + lane * Vec + i % Vec] = sum[n][i];
        tops[warp][n] = top[n];
        totals[warp][n] = total[n];
      }
    }
    SYNC();
    for (int at = me; at < Queries * Dv; at += Threads) {
      const int n = at / Dv;
      float highest = tops[0][n];
      for (int warp = 1; warp < WARPS; ++warp)
        highest = tops[warp][n] > highest ? tops[warp][n] : highest;
      float all = 0.0f;
      float mixed = 0.0f;
      for (int warp = 0; warp < WARPS; ++warp) {
        const float fade = EXP(tops[warp][n] - highest);
        all += totals[warp][n] * fade;
        mixed += sums[warp][n][at % Dv] * fade;
      }
      const int query_head = first_query + n;
      if (Whole) {
        if (Sinks) {
          const float sink = static_cast<float>(sinks[query_head]);
          const float higher = sink > highest ? sink : highest;
          const float fade = EXP(highest - higher);
          mixed *= fade;
          all = all * fade + EXP(sink - higher);
        }
        out[(static_cast<size_t>(row) * num_query_heads + query_head) * Dv + at % Dv] =
            static_cast<O>(mixed / all);
      } else {
        const size_t part =
            (static_cast<size_t>(row) * num_query_heads + query_head) * num_splits + split;
        out[part * Dv + at % Dv] = static_cast<O>(mixed);
        if (at % Dv == 0) {
          weights[2 * part] = highest;
          weights[2 * part + 1] = all;
        }
      }
    }

    // The row's new tail: the first of those that share a key head and have the last stretch.
    if (split == num_splits - 1 && PLACE_Y % Shares == 0) {
      for (int i = me; i < Tail * D / Vec; i += Threads) {
        const int column = i * Vec / D;
        const GLOBAL T* from =
            column == now ? new_key + i * Vec % D : tail_k + tail_at * D + i * Vec;
        *reinterpret_cast<GLOBAL Chunk*>(new_tail_k + tail_at * D + i * Vec) =
            *reinterpret_cast<const GLOBAL Chunk*>(from);
      }
      for (int i = me; i < Tail * Dv / Vec; i += Threads) {
        const int column = i * Vec / Dv;
        const GLOBAL T* from =
            column == now ? new_value + i * Vec % Dv : tail_v + tail_at * Dv + i * Vec;
        *reinterpret_cast<GLOBAL Chunk*>(new_tail_v + tail_at * Dv + i * Vec) =
            *reinterpret_cast<const GLOBAL Chunk*>(from);
      }
    }
"""

_ADD_UP = """
    const int query_head = PLACE_X;
    const int row = PLACE_Y;
    const int num_splits = parts_shape[2];
    const size_t place = static_cast<size_t>(row) * parts_shape[1] + query_head;
    float highest = -1e30f;
    for (int split = 0; split < num_splits; ++split) {
      const float top = weights[2 * (place * num_splits + split)];
      highest = top > highest ? top : highest;
    }
    if (Sinks) {
      const float sink = static_cast<float>(sinks[query_head]);
      highest = sink > highest ? sink : highest;
    }
    for (int i = THREAD; i < Dv; i += Threads) {
      float all = Sinks ? EXP(static_cast<float>(sinks[query_head]) - highest) : 0.0f;
      float mixed = 0.0f;
      for (int split = 0; split < num_splits; ++split) {
        const size_t part = place * num_splits + split;
        const float fade = EXP(weights[2 * part] - highest);
        all += weights[2 * part + 1] * fade;
        mixed += parts[part * Dv + i] * fade;
      }
      out[place * Dv + i] = static_cast<T>(mixed / all);
    }
"""


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
        few = max(MOST_SHARED // (FEWEST_THREADS // 32) // dims[1], 1)
        queries = next(n for n in (8, 4, 2, 1) if repeats % n == 0 and n <= few)
        smallest, largest = sorted(dims)
        fits = (n for n in (8, 16, 32) if queries * largest // n <= MOST_REGISTERS)
        lanes = next(fits, 32)
        vec = next(n for n in (8, 4, 2, 1) if n * size <= 16 and smallest // lanes % n == 0)
        warps = MOST_SHARED // (queries * dims[1])
        threads = 32 << (warps.bit_length() - 1)
        return cls(queries, repeats // queries, lanes, vec, min(threads, MOST_THREADS))


def for_layout(layout: Layout) -> AttendPacked | None:
    """The kernel for this device and these layers; None where there is none."""
    leaves = [layout.leaves[index] for index in layout.kv_indices]
    dialect = _dialect()
    if dialect is None or not leaves or not all(map(_takes, leaves)):
        return None
    return partial(attend_packed, dialect=dialect)


def _dialect() -> Dialect | None:
    if mx.default_device() != mx.Device(mx.gpu):
        return None
    return "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else None


def _takes(leaf: Leaf) -> bool:
    dims = [dim for _, dim in leaf.shapes]
    whole = all(dim % 32 == 0 for dim in dims) and max(dims) % min(dims) == 0
    return leaf.reads is Reads.PIECES and whole and len(set(leaf.dtypes)) == 1


@cache
def _kernels(dialect: Dialect) -> tuple[Callable[..., list[mx.array]], ...]:
    make = mx.fast.cuda_kernel if dialect == "cuda" else mx.fast.metal_kernel
    attend = make(
        name="pippin_attend_packed",
        input_names=[
            *("q", "k", "v", "tail_k", "tail_v", "main_k", "main_v"),
            *("places", "visible_tail", "cursor", "scale", "sinks"),
        ],
        output_names=["out", "weights", "new_tail_k", "new_tail_v"],
        header=_DIALECTS[dialect],
        source=_ATTEND,
        ensure_row_contiguous=False,
    )
    add_up = make(
        name="pippin_add_up_stretches",
        input_names=["parts", "weights", "sinks"],
        output_names=["out"],
        header=_DIALECTS[dialect],
        source=_ADD_UP,
    )
    return attend, add_up  # type: ignore[return-value]


@cache
def _number(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


def cut(num_blocks: int, num_columns: int, form: Form) -> tuple[int, int]:
    """Into how many stretches a row's columns are cut, and how many threads take one.

    `num_blocks`: one for each row and key head; `num_columns`: of the longest row. A short row is
    one stretch, for as many threads as it can use: adding stretches up costs another launch.
    """
    if num_columns <= ROUNDS_OF_ONE_STRETCH * form.most_threads // form.lanes:
        return 1, form.most_threads
    most = num_columns // SHORTEST_STRETCH
    return max(1, min(most, WANTED_BLOCKS // num_blocks)), FEWEST_THREADS


def attend_packed(
    q: mx.array,  # [rows, query heads, 1, D]
    k: mx.array,  # [rows, heads, 1, D]: this step's
    v: mx.array,  # [rows, heads, 1, Dv]
    tail: tuple[mx.array, mx.array],  # [rows, heads, TAIL, D or Dv]
    main: tuple[mx.array, mx.array],  # [heads, columns of all rows, D or Dv]
    places: mx.array,  # int32 [rows, 2]: where a row's columns begin, and how many it sees
    visible_tail: mx.array,  # bool [rows, TAIL]
    cursor: mx.array,  # int32 [1]: the tail column of this step
    scale: float,
    sinks: mx.array | None,
    num_columns: int,  # of the longest row
    dialect: Dialect,
) -> tuple[mx.array, mx.array, mx.array]:
    """What the rows attend to, [rows, query heads, 1, Dv], and the new tails."""
    num_rows, num_query_heads, _, dim = q.shape
    num_heads, v_dim = v.shape[1], v.shape[3]
    form = Form.of(num_query_heads, num_heads, (dim, v_dim), q.dtype.size)
    num_splits, threads = cut(num_rows * num_heads * form.shares, num_columns, form)
    whole = num_splits == 1
    attend, add_up = _kernels(dialect)
    sizes = [("Dv", v_dim), ("Sinks", sinks is not None)]
    some_sinks = _number(0.0) if sinks is None else sinks
    parts = (num_rows, num_query_heads, num_splits)
    out, weights, tail_k, tail_v = attend(
        inputs=[q, k, v, *tail, *main, places, visible_tail, cursor, _number(scale), some_sinks],
        template=[
            ("T", q.dtype),
            ("O", q.dtype if whole else mx.float32),
            ("D", dim),
            *sizes,
            ("Threads", threads),
            ("Tail", visible_tail.shape[1]),
            ("Queries", form.queries),
            ("Shares", form.shares),
            ("Lanes", form.lanes),
            ("Vec", form.vec),
            ("Ahead", AHEAD),
            ("Whole", whole),
        ],
        grid=(threads * num_splits, num_heads * form.shares, num_rows),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (num_rows, num_query_heads, 1, v_dim) if whole else (*parts, v_dim),
            (1,) if whole else (*parts, 2),
            tail[0].shape,
            tail[1].shape,
        ],
        output_dtypes=[q.dtype if whole else mx.float32, mx.float32, q.dtype, q.dtype],
    )
    if not whole:
        (out,) = add_up(
            inputs=[out, weights, some_sinks],
            template=[("T", q.dtype), *sizes, ("Threads", FEWEST_THREADS)],
            grid=(FEWEST_THREADS * num_query_heads, num_rows, 1),
            threadgroup=(FEWEST_THREADS, 1, 1),
            output_shapes=[(num_rows, num_query_heads, 1, v_dim)],
            output_dtypes=[q.dtype],
        )
    return out, tail_k, tail_v


def attend_packed_plainly(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    tail: tuple[mx.array, mx.array],
    main: tuple[mx.array, mx.array],
    places: mx.array,
    visible_tail: mx.array,
    cursor: mx.array,
    scale: float,
    sinks: mx.array | None,
    num_columns: int,
) -> tuple[mx.array, mx.array, mx.array]:
    """The same in plain operations: what the kernel is checked against, on any device."""
    tail_k, tail_v = (
        mx.slice_update(old, new, cursor, (2,)) for old, new in zip(tail, (k, v), strict=True)
    )
    columns = mx.arange(num_columns)
    at = mx.minimum(places[:, :1] + columns, main[0].shape[1] - 1)
    own_k, own_v = (mx.take(side, at, axis=1).swapaxes(0, 1) for side in main)
    visible = mx.concatenate([columns < places[:, 1:], visible_tail], axis=1)[:, None, None]
    out = mx.fast.scaled_dot_product_attention(
        q,
        mx.concatenate([own_k, tail_k], axis=2),
        mx.concatenate([own_v, tail_v], axis=2),
        scale=scale,
        mask=visible,
        sinks=sinks,
    )
    return out, tail_k, tail_v
