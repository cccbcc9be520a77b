"""Many tokens of the gated delta rule as one CUDA kernel; the same arithmetic as gated_delta.py.

Blocked products (gated_delta.py) take some seventy launches a layer, and launching is what a GPU
waits for. Here every line of every state walks through the tokens by itself: a few lanes share a
line, which stays in registers, and keys and queries come by way of shared memory.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.gpu.cuda_kernel import CudaKernel
from pippin.backends.mlx.recurrent.taps import block_states_are_tapped, record_block_states
from pippin.types import GRID

THREADS = 128
LANES = 8  # that share a line: few, so that adding up over them is short
LINES = THREADS // LANES  # of a state, in one block of threads
TILE = 16  # tokens in shared memory at a time

_SOURCE = """
    constexpr int PER_LANE = Dk / Lanes;
    constexpr int LINES = Threads / Lanes;
    constexpr int FOURS = Tile * Dk / 4 / Threads;  // of a tile's keys, for each thread to fetch
    constexpr int VALUES = Tile * LINES / Threads;
    const int num_tokens = k_shape[1];
    const int thread = threadIdx.x;
    const int lane = thread % Lanes;
    const int line = blockIdx.x * LINES + thread / Lanes;  // of a state: a value channel
    const int head = blockIdx.y;
    const int row = blockIdx.z;
    const int key_head = head / (Hv / Hk);
    const size_t first_token = static_cast<size_t>(row) * num_tokens;

    __shared__ float4 keys[Tile * Dk / 4], queries[Tile * Dk / 4];
    __shared__ float values[Tile * LINES], gates[Tile], betas[Tile];

    // A lane holds four channels of its line, then the four after those of the other lanes.
    float held[PER_LANE];
    const size_t state_at = ((static_cast<size_t>(row) * Hv + head) * Dv + line) * Dk;
    #pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      held[i] = state[state_at + (i / 4) * (4 * Lanes) + lane * 4 + i % 4];

    // The next tile is on its way while one is computed.
    float4 next_keys[FOURS], next_queries[FOURS];
    float next_values[VALUES], next_gate = 1.0f, next_beta = 0.0f;
    auto fetch = [&](int first) {
      #pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        const int at = i * Threads + thread;
        const int token = first + at / (Dk / 4);
        if (token >= num_tokens) continue;
        const size_t from = ((first_token + token) * Hk + key_head) * (Dk / 4) + at % (Dk / 4);
        next_keys[i] = reinterpret_cast<const float4*>(k)[from];
        next_queries[i] = reinterpret_cast<const float4*>(q)[from];
      }
      #pragma unroll
      for (int i = 0; i < VALUES; ++i) {
        const int at = i * Threads + thread;
        const int token = first + at / LINES;
        if (token < num_tokens)
          next_values[i] = v[((first_token + token) * Hv + head) * Dv + blockIdx.x * LINES
              + at % LINES];
      }
      if (thread < Tile && first + thread < num_tokens) {
        next_gate = g[(first_token + first + thread) * Hv + head];
        next_beta = beta[(first_token + first + thread) * Hv + head];
      }
    };

    fetch(0);
    for (int first = 0; first < num_tokens; first += Tile) {
      const int count = min(Tile, num_tokens - first);
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < FOURS; ++i) {
        keys[i * Threads + thread] = next_keys[i];
        queries[i * Threads + thread] = next_queries[i];
      }
      #pragma unroll
      for (int i = 0; i < VALUES; ++i) values[i * Threads + thread] = next_values[i];
      if (thread < Tile) {
        gates[thread] = next_gate;
        betas[thread] = next_beta;
      }
      __syncthreads();
      fetch(first + Tile);

      for (int t = 0; t < count; ++t) {
        const float gate = gates[t];
        float key[PER_LANE];
        float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        #pragma unroll
        for (int i = 0; i < PER_LANE / 4; ++i) {
          const float4 four = keys[t * (Dk / 4) + i * Lanes + lane];
          key[4 * i] = four.x;
          key[4 * i + 1] = four.y;
          key[4 * i + 2] = four.z;
          key[4 * i + 3] = four.w;
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            held[4 * i + j] *= gate;
            sums[j] += held[4 * i + j] * key[4 * i + j];
          }
        }
        float recalled = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        #pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2)
          recalled += __shfl_xor_sync(~0u, recalled, step);
        const float delta = (values[t * LINES + thread / Lanes] - recalled) * betas[t];
        sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
        #pragma unroll
        for (int i = 0; i < PER_LANE / 4; ++i) {
          const float4 four = queries[t * (Dk / 4) + i * Lanes + lane];
          const float query[4] = {four.x, four.y, four.z, four.w};
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            held[4 * i + j] += key[4 * i + j] * delta;
            sums[j] += held[4 * i + j] * query[j];
          }
        }
        float out = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        #pragma unroll
        for (int step = Lanes / 2; step > 0; step /= 2)
          out += __shfl_xor_sync(~0u, out, step);
        if (lane == 0)
          y[((first_token + first + t) * Hv + head) * Dv + line] = static_cast<T>(out);

        const int done = first + t + 1;
        if (Taps && (done % Grid == 0 || done == num_tokens)) {
          const int number = (done - 1) / Grid;
          const int num_blocks = (num_tokens + Grid - 1) / Grid;
          const size_t at = ((((static_cast<size_t>(row) * num_blocks + number) * Hv) + head) * Dv
              + line) * Dk;
          for (int i = 0; i < PER_LANE; ++i)
            block_states[at + (i / 4) * (4 * Lanes) + lane * 4 + i % 4] = held[i];
        }
      }
    }
    for (int i = 0; i < PER_LANE; ++i)
      new_state[state_at + (i / 4) * (4 * Lanes) + lane * 4 + i % 4] = held[i];
"""


_KERNEL = CudaKernel(
    "pippin_gated_delta_scan",
    input_names=["q", "k", "v", "g", "beta", "state"],
    output_names=["y", "new_state", "block_states"],
    source=_SOURCE,
)


def fits(k_dim: int, v_dim: int) -> bool:
    """Whether lanes, lines and tiles come out even."""
    whole_tiles = TILE * k_dim % (4 * THREADS) == 0
    return k_dim % (4 * LANES) == 0 and v_dim % LINES == 0 and whole_tiles


def takes(k_dim: int, v_dim: int) -> bool:
    """Whether the kernel is for this device and these shapes."""
    on_cuda = mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return bool(on_cuda) and fits(k_dim, v_dim)


def gated_delta_scan(
    q: mx.array,  # float32 [B, T, Hk, Dk], like all of these
    k: mx.array,  # [B, T, Hk, Dk]
    v: mx.array,  # [B, T, Hv, Dv]
    g: mx.array,  # [B, T, Hv]
    beta: mx.array,  # [B, T, Hv]
    state: mx.array,  # [B, Hv, Dv, Dk]
    *,
    dtype: mx.Dtype,  # of the outputs
) -> tuple[mx.array, mx.array]:
    """Outputs and the final state; states at every GRID tokens for whoever taps them."""
    batch, num_tokens, num_k_heads, k_dim = k.shape
    num_v_heads, v_dim = v.shape[2:]
    taps = block_states_are_tapped()
    num_blocks = -(-num_tokens // GRID)
    y, new_state, block_states = _KERNEL(
        inputs=[q, k, v, g, beta, state],
        template=[
            ("T", dtype),
            ("Dk", k_dim),
            ("Dv", v_dim),
            ("Hk", num_k_heads),
            ("Hv", num_v_heads),
            ("Threads", THREADS),
            ("Lanes", LANES),
            ("Tile", TILE),
            ("Grid", GRID),
            ("Taps", taps),
        ],
        grid=(THREADS * v_dim // LINES, num_v_heads, batch),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            v.shape,
            state.shape,
            (batch, num_blocks, *state.shape[1:]) if taps else (1,),
        ],
        output_dtypes=[dtype, mx.float32, mx.float32],
    )
    if taps:
        # In buffers of their own: a view would keep the states of all blocks alive.
        record_block_states([mx.contiguous(block_states[:, n]) for n in range(num_blocks)])
    return y, new_state
