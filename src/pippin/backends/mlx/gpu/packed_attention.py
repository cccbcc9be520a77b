"""Attention of a token of each row, or of several, over packed keys: one or two Metal kernels.

    a segment of mains:   [ row 0's columns | row 3's columns | row 1's columns | ... ]
    one row's keys:       [ its columns of segment 0 | of segment 1 | ... | its line of the tails ]

Plain operations take a dozen launches for it, and with many layers a decode step on a GPU is all
launches. Here a block of threads takes a stretch of one row's columns for the queries of one key
head, and the one with the last stretch also writes the row's new tail. Where a row has several
stretches, a second kernel adds them up. Drafts that are verified are tokens of a row too, each with
what it sees.

Sizes are constants of a call; lengths and places are data. mlx declares attributes of Metal, such
as `threadgroup_position_in_grid`, whose names it finds in the source; it does not read headers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from pippin.backends.mlx.attention.head_ropes import Rope
from pippin.backends.mlx.attention.packed_rows import MOST_SEGMENTS, PackedCall
from pippin.backends.mlx.device import gpu_cores
from pippin.backends.mlx.gpu.kernels import Constants, run_kernel
from pippin.backends.mlx.layout import LayerCache

# Channel `c` of a query or a key, normed and rotated.
HEADER = """
template <typename T, int D, int Rotated, bool Traditional, bool Normed>
float rotated(
    const device T* x, size_t stride, int c, float size, float position,
    const device float* angles, const device float* weights) {
  float own = static_cast<float>(x[c * stride]) * size;
  if (Normed) own *= weights[c];
  if (c >= Rotated) return own;
  constexpr int HALF = Rotated / 2 > 0 ? Rotated / 2 : 1;
  const bool second = Traditional ? c % 2 : c >= HALF;
  const int partner = Traditional ? c ^ 1 : second ? c - HALF : c + HALF;
  float other = static_cast<float>(x[partner * stride]) * size;
  if (Normed) other *= weights[partner];
  const float angle = position * angles[Traditional ? c / 2 : c % HALF];
  const float cosine = metal::precise::cos(angle), sine = metal::precise::sin(angle);
  return own * cosine + (second ? other : -other) * sine;
}
"""

ATTEND = """
    constexpr int PER_LANE = D / Lanes;
    constexpr int PER_LANE_V = Dv / Lanes;
    constexpr int GROUPS = Threads / Lanes;  // each takes one column at a time
    constexpr int WARPS = Threads / 32;
    constexpr float LEAST = -1e30f;
    struct alignas(sizeof(T) * Vec) Chunk { T at[Vec]; };
    const int me = thread_position_in_threadgroup.x;  // (`thread` is a keyword of Metal)
    const int lane = me % Lanes;
    const int group = me / Lanes;
    const int split = threadgroup_position_in_grid.x;
    const int num_splits = threadgroups_per_grid.x;
    const int head = threadgroup_position_in_grid.y / Shares;             // of the keys
    const int first_query = threadgroup_position_in_grid.y * Queries;     // head of the queries
    const int line = threadgroup_position_in_grid.z;  // a token of a row
    const int row = line / Tokens;
    const int token = line % Tokens;
    const int num_query_heads = threadgroups_per_grid.y * Queries;
    const int num_heads = threadgroups_per_grid.y / Shares;

    // This row's columns in each segment: counted through all of them, one ends where the next
    // begins; `from`: what is added to such a number to find the column in its segment.
    const device int* own = places + 8 * line;
    const int from0 = own[0], end0 = own[1];
    const int from1 = own[2] - end0, end1 = end0 + own[3];
    const int from2 = own[4] - end1, end2 = end1 + own[5];
    const int from3 = own[6] - end2, num_main = end2 + own[7];
    const int num_columns = num_main + Tail;
    const int per_split = (num_columns + num_splits - 1) / num_splits;
    const int begin = split * per_split;
    const int end = begin + per_split < num_columns ? begin + per_split : num_columns;
    const int now = cursor[row];  // of the row's first new column

    const device float* angles = numbers + 8;
    const device float* query_weights = angles + Rotated / 2;
    const float position = Rotated ? static_cast<float>(positions[row]) : 0.0f;

    // This step's key, if it is one.
    const device T* key_in = k + row * k_strides[0] + head * k_strides[1];
    threadgroup Chunk new_key[D / Vec];
    float key_size = numbers[4];
    if (Normed) {
      float squares = 0.0f;
      for (int c = me % 32; c < D; c += 32) {
        const float x = static_cast<float>(key_in[c * k_strides[3]]);
        squares += x * x;
      }
      key_size *= metal::rsqrt(simd_sum(squares) / D + numbers[2]);
    }
    for (int c = me; c < D; c += Threads)
      new_key[c / Vec].at[c % Vec] = static_cast<T>(
          rotated<T, D, Rotated, Traditional, Normed>(
              key_in, k_strides[3], c, key_size, position, angles, query_weights + D));
    threadgroup_barrier(mem_flags::mem_threadgroup);  // new_key
    const device T* new_value = v + row * v_strides[0] + head * v_strides[1];
    const size_t at0 = static_cast<size_t>(head) * sizes[0];  // where this head begins
    const size_t at1 = static_cast<size_t>(head) * sizes[1];
    const size_t at2 = static_cast<size_t>(head) * sizes[2];
    const size_t at3 = static_cast<size_t>(head) * sizes[3];
    const size_t tail_at = (static_cast<size_t>(row) * num_heads + head) * Tail;

    // A lane's channels: Vec of them side by side, then as many after those of the other lanes.
    float query[Queries][PER_LANE];
    float sum[Queries][PER_LANE_V];
    float top[Queries], total[Queries];
    _Pragma("unroll")
    for (int n = 0; n < Queries; ++n) {
      const device T* own = q + row * q_strides[0] + (first_query + n) * q_strides[1]
          + token * q_strides[2];
      float size = numbers[3];
      if (Normed) {
        float squares = 0.0f;
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE; ++i) {
          const float x = static_cast<float>(
              own[((i / Vec) * Vec * Lanes + lane * Vec + i % Vec) * q_strides[3]]);
          squares += x * x;
        }
        _Pragma("unroll")
        for (int step = Lanes / 2; step > 0; step /= 2) squares += simd_shuffle_xor(squares, step);
        size *= metal::rsqrt(squares / D + numbers[1]);
      }
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i)
        query[n][i] = numbers[0] * rotated<T, D, Rotated, Traditional, Normed>(
            own, q_strides[3], (i / Vec) * Vec * Lanes + lane * Vec + i % Vec, size, position,
            angles, query_weights);
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE_V; ++i) sum[n][i] = 0.0f;
      top[n] = LEAST;
      total[n] = 0.0f;
    }

    for (int from = begin; from < end; from += Ahead * GROUPS) {
      // Fetch the columns of a few rounds first: memory is far away.
      Chunk keys[Ahead][PER_LANE / Vec], values[Ahead][PER_LANE_V / Vec];
      bool visible[Ahead];
      _Pragma("unroll")
      for (int a = 0; a < Ahead; ++a) {
        const int column = from + a * GROUPS + group;
        visible[a] = column < end
            && (column < num_main || visible_tail[line * Tail + column - num_main]);
        const int safe = visible[a] ? column : begin;
        const int in_tail = safe - num_main;
        const bool is_new = in_tail >= now && in_tail < now + Tokens;
        const device T* key = key_in;
        const device T* value = new_value;
        if (is_new) {
          key += (in_tail - now) * k_strides[2];
          value += (in_tail - now) * v_strides[2];
        } else {
          const size_t at = in_tail >= 0 ? tail_at + in_tail
              : safe < end0 ? at0 + from0 + safe
              : safe < end1 ? at1 + from1 + safe
              : safe < end2 ? at2 + from2 + safe : at3 + from3 + safe;
          key = (in_tail >= 0 ? tail_k : safe < end0 ? main_k0 : safe < end1 ? main_k1
              : safe < end2 ? main_k2 : main_k3) + at * D;
          value = (in_tail >= 0 ? tail_v : safe < end0 ? main_v0 : safe < end1 ? main_v1
              : safe < end2 ? main_v2 : main_v3) + at * Dv;
        }
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE / Vec; ++i) {
          if (Tokens == 1 && is_new) keys[a][i] = new_key[i * Lanes + lane];
          else keys[a][i] = *reinterpret_cast<const device Chunk*>(key + (i * Lanes + lane) * Vec);
        }
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE_V / Vec; ++i)
          values[a][i] = *reinterpret_cast<const device Chunk*>(value + (i * Lanes + lane) * Vec);
      }
      _Pragma("unroll")
      for (int a = 0; a < Ahead; ++a) {
        float score[Queries];
        _Pragma("unroll")
        for (int n = 0; n < Queries; ++n) {
          score[n] = 0.0f;
          _Pragma("unroll")
          for (int i = 0; i < PER_LANE; ++i)
            score[n] += query[n][i] * static_cast<float>(keys[a][i / Vec].at[i % Vec]);
          _Pragma("unroll")
          for (int step = Lanes / 2; step > 0; step /= 2)
            score[n] += simd_shuffle_xor(score[n], step);
          const float higher = visible[a] && score[n] > top[n] ? score[n] : top[n];
          const float fade = metal::exp(top[n] - higher);
          score[n] = visible[a] ? metal::exp(score[n] - higher) : 0.0f;
          top[n] = higher;
          total[n] = total[n] * fade + score[n];
          _Pragma("unroll")
          for (int i = 0; i < PER_LANE_V; ++i) sum[n][i] *= fade;
        }
        if (!visible[a]) continue;  // what is there weighs nothing, but nothing times inf does not
        _Pragma("unroll")
        for (int n = 0; n < Queries; ++n)
          _Pragma("unroll")
          for (int i = 0; i < PER_LANE_V; ++i)
            sum[n][i] += score[n] * static_cast<float>(values[a][i / Vec].at[i % Vec]);
      }
    }

    // Add up: the groups of a SIMD group, then the SIMD groups.
    for (int distance = Lanes; distance < 32; distance *= 2) {
      _Pragma("unroll")
      for (int n = 0; n < Queries; ++n) {
        const float other = simd_shuffle_xor(top[n], distance);
        const float higher = top[n] > other ? top[n] : other;
        const float fade = metal::exp(top[n] - higher);
        const float other_fade = metal::exp(other - higher);
        const float other_total = simd_shuffle_xor(total[n], distance);
        total[n] = total[n] * fade + other_total * other_fade;
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE_V; ++i) {
          const float other_sum = simd_shuffle_xor(sum[n][i], distance);
          sum[n][i] = sum[n][i] * fade + other_sum * other_fade;
        }
        top[n] = higher;
      }
    }
    threadgroup float tops[WARPS][Queries], totals[WARPS][Queries], sums[WARPS][Queries][Dv];
    if (me % 32 < Lanes) {
      const int warp = me / 32;
      _Pragma("unroll")
      for (int n = 0; n < Queries; ++n) {
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE_V; ++i)
          sums[warp][n][(i / Vec) * Vec * Lanes + lane * Vec + i % Vec] = sum[n][i];
        tops[warp][n] = top[n];
        totals[warp][n] = total[n];
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int at = me; at < Queries * Dv; at += Threads) {
      const int n = at / Dv;
      float highest = tops[0][n];
      for (int warp = 1; warp < WARPS; ++warp)
        highest = tops[warp][n] > highest ? tops[warp][n] : highest;
      float all = 0.0f;
      float mixed = 0.0f;
      for (int warp = 0; warp < WARPS; ++warp) {
        const float fade = metal::exp(tops[warp][n] - highest);
        all += totals[warp][n] * fade;
        mixed += sums[warp][n][at % Dv] * fade;
      }
      const int query_head = first_query + n;
      const size_t place =
          (static_cast<size_t>(row) * num_query_heads + query_head) * Tokens + token;
      if (Whole) {
        if (Sinks) {
          const float sink = static_cast<float>(sinks[query_head]);
          const float higher = sink > highest ? sink : highest;
          const float fade = metal::exp(highest - higher);
          mixed *= fade;
          all = all * fade + metal::exp(sink - higher);
        }
        out[place * Dv + at % Dv] = static_cast<O>(mixed / all);
      } else {
        const size_t part = place * num_splits + split;
        out[part * Dv + at % Dv] = static_cast<O>(mixed);
        if (at % Dv == 0) {
          weights[2 * part] = highest;
          weights[2 * part + 1] = all;
        }
      }
    }

    // The row's new tail: the first of those that share a key head and have the last stretch.
    if (split == num_splits - 1 && threadgroup_position_in_grid.y % Shares == 0 && token == 0) {
      for (int i = me; i < Tail * D / Vec; i += Threads) {
        const int age = i * Vec / D - now;
        Chunk kept = new_key[i % (D / Vec)];
        if (Tokens > 1 || age != 0)
          kept = *reinterpret_cast<const device Chunk*>(age >= 0 && age < Tokens
              ? key_in + age * k_strides[2] + i * Vec % D : tail_k + tail_at * D + i * Vec);
        *reinterpret_cast<device Chunk*>(new_tail_k + tail_at * D + i * Vec) = kept;
      }
      for (int i = me; i < Tail * Dv / Vec; i += Threads) {
        const int age = i * Vec / Dv - now;
        const device T* from = age >= 0 && age < Tokens
            ? new_value + age * v_strides[2] + i * Vec % Dv : tail_v + tail_at * Dv + i * Vec;
        *reinterpret_cast<device Chunk*>(new_tail_v + tail_at * Dv + i * Vec) =
            *reinterpret_cast<const device Chunk*>(from);
      }
    }
"""

ADD_UP = """
    const size_t place = threadgroup_position_in_grid.x;  // a token of a row's query head
    const int query_head = place / parts_shape[2] % parts_shape[1];
    const int num_splits = parts_shape[3];
    float highest = -1e30f;
    for (int split = 0; split < num_splits; ++split) {
      const float top = weights[2 * (place * num_splits + split)];
      highest = top > highest ? top : highest;
    }
    if (Sinks) {
      const float sink = static_cast<float>(sinks[query_head]);
      highest = sink > highest ? sink : highest;
    }
    for (int i = thread_position_in_threadgroup.x; i < Dv; i += Threads) {
      float all = Sinks ? metal::exp(static_cast<float>(sinks[query_head]) - highest) : 0.0f;
      float mixed = 0.0f;
      for (int split = 0; split < num_splits; ++split) {
        const size_t part = place * num_splits + split;
        const float fade = metal::exp(weights[2 * part] - highest);
        all += weights[2 * part + 1] * fade;
        mixed += parts[part * Dv + i] * fade;
      }
      out[place * Dv + i] = static_cast<T>(mixed / all);
    }
"""


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
