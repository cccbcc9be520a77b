"""Attention of a token of each row over packed latents (MLA): one or two kernels.

    a column:   [ latent: keys and values of all heads | rotated key ]

All heads of queries read the same columns. So a block of threads fetches a few columns at a time
for a SIMD group of each few heads, and no head is added up across SIMD groups. Blocks take a row's
stretches as packed_attention.py cuts them, and its second kernel adds these up.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.attention.packed_rows import PackedCall
from pippin.backends.mlx.gpu.packed_attention import MOST_STATE, num_stretches, run_stretches
from pippin.backends.mlx.layout import LayerCache

ATTEND_LATENTS = """
    constexpr int PER_LANE = D / 32;
    constexpr int PER_LANE_R = R / 32;
    constexpr int WIDTH = D + R;                 // of a column: its latent, its rotated key
    constexpr int CHUNKS = WIDTH / Vec;
    constexpr float LEAST = -1e30f;
    struct alignas(sizeof(T) * Vec) Chunk { T at[Vec]; };
    const int me = thread_position_in_threadgroup.x;
    const int lane = me % 32;
    const int split = threadgroup_position_in_grid.x;
    const int num_splits = threadgroups_per_grid.x;
    const int row = threadgroup_position_in_grid.z;
    // Heads of queries: a SIMD group has its own ones; the last of a row may have none.
    const int first_query = (threadgroup_position_in_grid.y * (Threads / 32) + me / 32) * Queries;
    const bool has_queries = first_query < Heads;

    // This row's columns in each segment: counted through all of them, one ends where the next
    // begins; `from`: what is added to such a number to find the column in its segment.
    const device int* own = places + 8 * row;
    const int from0 = own[0], end0 = own[1];
    const int from1 = own[2] - end0, end1 = end0 + own[3];
    const int from2 = own[4] - end1, end2 = end1 + own[5];
    const int from3 = own[6] - end2, num_main = end2 + own[7];
    const int num_columns = num_main + Tail;
    const int per_split = (num_columns + num_splits - 1) / num_splits;
    const int begin = split * per_split;
    const int end = begin + per_split < num_columns ? begin + per_split : num_columns;
    const int now = cursor[row];
    const size_t tail_at = static_cast<size_t>(row) * Tail;

    // This step's column, and those that all SIMD groups read next.
    threadgroup Chunk fresh[CHUNKS];
    threadgroup Chunk tile[Tile * CHUNKS];
    threadgroup bool seen[Tile];
    const float position = Rotated ? static_cast<float>(positions[row]) : 0.0f;
    const device float* angles = numbers + 8;
    for (int c = me; c < D; c += Threads)
      fresh[c / Vec].at[c % Vec] = k[row * k_strides[0] + c * k_strides[3]];
    for (int c = me; c < R; c += Threads)
      fresh[(D + c) / Vec].at[c % Vec] = static_cast<T>(
          rotated<T, R, Rotated, Traditional, false>(
              r + row * r_strides[0], r_strides[3], c, numbers[4], position, angles, angles));

    // A lane's channels: Vec of them side by side, then as many after those of the other lanes.
    T query[Queries][PER_LANE];
    float rotated_query[Queries][PER_LANE_R];
    float sum[Queries][PER_LANE];
    float top[Queries], total[Queries];
    _Pragma("unroll")
    for (int n = 0; n < Queries; ++n) {
      const int head = has_queries ? first_query + n : 0;
      const device T* latent = q + row * q_strides[0] + head * q_strides[1];
      const device T* beside = p + row * p_strides[0] + head * p_strides[1];
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i) {
        query[n][i] = latent[((i / Vec) * Vec * 32 + lane * Vec + i % Vec) * q_strides[3]];
        sum[n][i] = 0.0f;
      }
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE_R; ++i)
        rotated_query[n][i] = rotated<T, R, Rotated, Traditional, false>(
            beside, p_strides[3], i * 32 + lane, numbers[3], position, angles, angles);
      top[n] = LEAST;
      total[n] = 0.0f;
    }
    const float scale = numbers[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);  // fresh

    for (int from = begin; from < end; from += Tile) {
      for (int i = me; i < Tile * CHUNKS; i += Threads) {
        const int column = from + i / CHUNKS;
        const int chunk = i % CHUNKS;
        const int in_tail = column - num_main;
        const bool visible = column < end && (in_tail < 0 || visible_tail[tail_at + in_tail]);
        Chunk fetched;
        if (visible && in_tail == now) {
          fetched = fresh[chunk];
        } else if (visible) {
          const size_t at = in_tail >= 0 ? tail_at + in_tail
              : column < end0 ? from0 + column
              : column < end1 ? from1 + column
              : column < end2 ? from2 + column : from3 + column;
          const device T* from_latents = in_tail >= 0 ? tail_k : column < end0 ? main_k0
              : column < end1 ? main_k1 : column < end2 ? main_k2 : main_k3;
          const device T* from_rotated = in_tail >= 0 ? tail_v : column < end0 ? main_v0
              : column < end1 ? main_v1 : column < end2 ? main_v2 : main_v3;
          fetched = *reinterpret_cast<const device Chunk*>(chunk * Vec < D
              ? from_latents + at * D + chunk * Vec : from_rotated + at * R + (chunk * Vec - D));
        } else {  // nothing times what is there might be no number
          _Pragma("unroll")
          for (int v = 0; v < Vec; ++v) fetched.at[v] = static_cast<T>(0.0f);
        }
        tile[i] = fetched;
        if (chunk == 0) seen[i / CHUNKS] = visible;
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // tile
      for (int c = 0; c < Tile; c += Ahead) {
        Chunk latent[Ahead][PER_LANE / Vec];
        float score[Ahead][Queries];
        _Pragma("unroll")
        for (int a = 0; a < Ahead; ++a) {
          const threadgroup Chunk* column = tile + (c + a) * CHUNKS;
          float beside[PER_LANE_R];
          _Pragma("unroll")
          for (int i = 0; i < PER_LANE / Vec; ++i) latent[a][i] = column[i * 32 + lane];
          _Pragma("unroll")
          for (int i = 0; i < PER_LANE_R; ++i)
            beside[i] = static_cast<float>(
                column[(D + i * 32 + lane) / Vec].at[(i * 32 + lane) % Vec]);
          _Pragma("unroll")
          for (int n = 0; n < Queries; ++n) {
            float product = 0.0f;
            _Pragma("unroll")
            for (int i = 0; i < PER_LANE; ++i)
              product += static_cast<float>(query[n][i])
                  * static_cast<float>(latent[a][i / Vec].at[i % Vec]);
            product *= scale;
            _Pragma("unroll")
            for (int i = 0; i < PER_LANE_R; ++i) product += rotated_query[n][i] * beside[i];
            score[a][n] = simd_sum(product);
          }
        }
        _Pragma("unroll")
        for (int a = 0; a < Ahead; ++a) {
          const bool visible = seen[c + a];
          _Pragma("unroll")
          for (int n = 0; n < Queries; ++n) {
            if (visible && score[a][n] > top[n]) {
              const float fade = metal::exp(top[n] - score[a][n]);
              top[n] = score[a][n];
              total[n] *= fade;
              _Pragma("unroll")
              for (int i = 0; i < PER_LANE; ++i) sum[n][i] *= fade;
            }
            const float weight = visible ? metal::exp(score[a][n] - top[n]) : 0.0f;
            total[n] += weight;
            _Pragma("unroll")
            for (int i = 0; i < PER_LANE; ++i)
              sum[n][i] += weight * static_cast<float>(latent[a][i / Vec].at[i % Vec]);
          }
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);  // all have read the tile
    }

    if (has_queries) {
      _Pragma("unroll")
      for (int n = 0; n < Queries; ++n) {
        const size_t place = static_cast<size_t>(row) * Heads + first_query + n;
        const size_t part = Whole ? place : place * num_splits + split;
        const float share = Whole ? 1.0f / total[n] : 1.0f;
        _Pragma("unroll")
        for (int i = 0; i < PER_LANE; ++i)
          out[part * D + (i / Vec) * Vec * 32 + lane * Vec + i % Vec] =
              static_cast<O>(sum[n][i] * share);
        if (!Whole && lane == 0) {
          weights[2 * part] = top[n];
          weights[2 * part + 1] = total[n];
        }
      }
    }

    // The row's new tail: the first that has the last stretch.
    if (split == num_splits - 1 && threadgroup_position_in_grid.y == 0) {
      for (int i = me; i < Tail * CHUNKS; i += Threads) {
        const int column = i / CHUNKS;
        const int c = i % CHUNKS * Vec;
        const size_t at = c < D ? (tail_at + column) * D + c : (tail_at + column) * R + (c - D);
        Chunk kept = fresh[i % CHUNKS];
        if (column != now)
          kept = *reinterpret_cast<const device Chunk*>((c < D ? tail_k : tail_v) + at);
        *reinterpret_cast<device Chunk*>((c < D ? new_tail_k : new_tail_v) + at) = kept;
      }
    }
"""


MOST_WARPS = 8  # SIMD groups of a block; not measured on Apple GPUs
TILE_BYTES = 18_432  # of the columns that a block has in threadgroup memory
MOST_COLUMNS = 16  # of these
AHEAD = 2  # columns whose scores are computed together
# A block has a few hundred threads of some hundred registers: a core has registers for two of them.
BLOCKS_PER_CORE = 3


@dataclass(frozen=True)
class LatentForm:
    """How the kernel is cut for one shape of layer."""

    queries: int  # heads of queries of a SIMD group
    warps: int  # SIMD groups of a block
    blocks: int  # for all heads of a row
    tile: int  # columns
    vec: int  # channels that are read at a time

    @classmethod
    def of(cls, num_heads: int, dims: tuple[int, int], size: int) -> LatentForm:
        """`dims`: channels of a latent and of a rotated key; `size`: bytes of a number."""
        latent, rotated = (dim // 32 for dim in dims)  # of a lane
        state = latent * size / 4 + rotated + latent  # its queries, and its sums
        queries = next(n for n in (4, 2, 1) if num_heads % n == 0 and n * state <= MOST_STATE)
        num_warps = num_heads // queries
        blocks = -(-num_warps // MOST_WARPS)
        vec = next(n for n in (8, 4, 2, 1) if n * size <= 16 and latent % n == 0)
        tile = min(TILE_BYTES // (sum(dims) * size), MOST_COLUMNS) // AHEAD * AHEAD
        return cls(queries, -(-num_warps // blocks), blocks, tile, vec)


def takes(cache: LayerCache) -> bool:
    """Whether the kernel is for such a layer."""
    (heads, latent), (other_heads, rotated) = cache.shapes
    whole = latent % 32 == 0 and rotated % 32 == 0 and heads == other_heads == 1
    small = 2 * latent + rotated <= 32 * MOST_STATE
    return whole and small and len(set(cache.dtypes)) == 1


def attend_latents(call: PackedCall) -> tuple[mx.array, mx.array, mx.array]:
    assert call.rotated is not None, "rows of latents have rotated keys"
    assert call.sinks is None, "latents have no sinks"
    num_rows, num_heads, num_tokens, dim = call.q.shape
    assert num_tokens == 1, "drafts of rows of latents are not verified"
    rotated_dim = call.rotated.shape[-1]
    form = LatentForm.of(num_heads, (dim, rotated_dim), call.q.dtype.size)
    return run_stretches(
        *("pippin_attend_latents", ATTEND_LATENTS, call),
        {"p": call.rotated, "r": call.v},
        {
            "D": dim,
            "R": rotated_dim,
            "Heads": num_heads,
            "Queries": form.queries,
            "Tile": form.tile,
            "Vec": form.vec,
            "Ahead": AHEAD,
        },
        blocks=form.blocks,
        num_splits=num_stretches(num_rows * form.blocks, call.num_columns, BLOCKS_PER_CORE),
        threads=32 * form.warps,
    )
