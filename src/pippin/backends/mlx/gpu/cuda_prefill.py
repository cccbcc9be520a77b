"""A Gated DeltaNet layer's many tokens between its two products, as three CUDA kernels.

    in_proj -> [ conv, silu, norms of q and k, gates ] -> [ scan ] -> [ gated norm ] -> out_proj

What cuda_layer.py is for one token. The first and the last kernel take every token and head by
itself; the scan between them is in cuda_scan.py. Tokens past a row's length (`lengths`) leave its
state alone; what comes out of them means nothing.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.gpu.cuda_kernel import CudaKernel

_PREPARE = """
    constexpr int K_ALL = Hk * Dk;
    constexpr int CHANNELS = 2 * K_ALL + Hv * Dv;
    constexpr int WIDTH = CHANNELS + Hv * Dv + 2 * Hv;  // qkv | z | b | a
    const int num_tokens = projected_shape[1];
    const int thread = threadIdx.x;
    const int part = blockIdx.x;  // a head of the queries, of the keys or of the values
    const int token = blockIdx.y;
    const int row = blockIdx.z;
    const int length = lengths[row];
    const bool is_value = part >= 2 * Hk;
    const int head = is_value ? part - 2 * Hk : part % Hk;
    const int dim = is_value ? Dv : Dk;
    const int first = is_value ? 2 * K_ALL + head * Dv : part * Dk;  // channel
    const auto* x = projected + static_cast<size_t>(row) * num_tokens * WIDTH;
    const auto* past = conv_state + static_cast<size_t>(row) * (Taps - 1) * CHANNELS;

    float y = 0.0f;
    if (thread < dim) {
      const int channel = first + thread;
      for (int i = 0; i < Taps; ++i) {
        const int at = token - (Taps - 1) + i;
        const float value = at < 0
            ? static_cast<float>(past[(Taps - 1 + at) * CHANNELS + channel])
            : static_cast<float>(x[static_cast<size_t>(at) * WIDTH + channel]);
        y += value * static_cast<float>(taps[i * CHANNELS + channel]);
      }
      y = y / (1.0f + expf(-y));
      if (token == 0) {  // what the next chunk's convolution looks back at
        for (int i = 0; i < Taps - 1; ++i) {
          const int at = length - (Taps - 1) + i;
          new_conv_state[(static_cast<size_t>(row) * (Taps - 1) + i) * CHANNELS + channel] = at < 0
              ? past[(Taps - 1 + at) * CHANNELS + channel]
              : x[static_cast<size_t>(at) * WIDTH + channel];
        }
      }
    }
    const size_t place = static_cast<size_t>(row) * num_tokens + token;
    if (is_value) {
      if (thread < dim) v[(place * Hv + head) * Dv + thread] = y;
      if (thread == 0) {
        const auto* own = x + static_cast<size_t>(token) * WIDTH + CHANNELS + Hv * Dv + head;
        const float a = static_cast<float>(own[Hv]) + static_cast<float>(dt_bias[head]);
        const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
        const bool counts = token < length;
        g[place * Hv + head] =
            counts ? expf(-expf(static_cast<float>(A_log[head])) * softplus) : 1.0f;
        beta[place * Hv + head] =
            counts ? 1.0f / (1.0f + expf(-static_cast<float>(own[0]))) : 0.0f;
      }
      return;
    }
    __shared__ float sums[Threads / 32];
    float sum = thread < dim ? y * y : 0.0f;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < Threads / 32; ++i) sum += sums[i];
    if (thread < dim) {
      const float scale = rsqrtf(sum + 1e-6f);
      const size_t at = (place * Hk + head) * Dk + thread;
      if (part < Hk) q[at] = y * scale * rsqrtf(static_cast<float>(Dk));
      else k[at] = y * scale;
    }
"""

_NORM = """
    constexpr int CHANNELS = 2 * Hk * Dk + Hv * Dv;
    constexpr int WIDTH = CHANNELS + Hv * Dv + 2 * Hv;
    const int thread = threadIdx.x;
    const int head = blockIdx.x;
    const size_t place = static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y;  // row, token
    const size_t at = (place * Hv + head) * Dv + thread;
    const float own = thread < Dv ? y[at] : 0.0f;
    __shared__ float sums[Threads / 32];
    float sum = own * own;
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (thread % 32 == 0) sums[thread / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < Threads / 32; ++i) sum += sums[i];
    if (thread < Dv) {
      const float z = static_cast<float>(projected[place * WIDTH + CHANNELS + head * Dv + thread]);
      const float normed = own * rsqrtf(sum / Dv + eps[0]) * static_cast<float>(norm[thread]);
      out[at] = static_cast<T>(normed * z / (1.0f + expf(-z)));
    }
"""

_PREPARE_KERNEL = CudaKernel(
    "pippin_gated_delta_prepare",
    input_names=["projected", "conv_state", "taps", "A_log", "dt_bias", "lengths"],
    output_names=["q", "k", "v", "g", "beta", "new_conv_state"],
    source=_PREPARE,
)
_NORM_KERNEL = CudaKernel(
    "pippin_gated_delta_norm",
    input_names=["y", "projected", "norm", "eps"],
    output_names=["out"],
    source=_NORM,
)


def prepare(
    projected: mx.array,  # [B, T, qkv | z | b | a]
    conv_state: mx.array,  # [B, Taps - 1, channels]
    taps: mx.array,  # [Taps, channels]
    A_log: mx.array,  # noqa: N803  [Hv] (mlx-lm's name)
    dt_bias: mx.array,  # [Hv]
    lengths: mx.array,  # int32 [B]
    *,
    k_heads: tuple[int, int],  # how many, and their size
    v_heads: tuple[int, int],
) -> list[mx.array]:
    """Queries, keys, values, gates and betas, all float32, and the convolution's next state."""
    batch, num_tokens, _ = projected.shape
    threads = _whole_warps(max(k_heads[1], v_heads[1]))
    return _PREPARE_KERNEL(
        inputs=[projected, conv_state, taps, A_log, dt_bias, lengths],
        template=[*_heads(k_heads, v_heads), ("Taps", taps.shape[0]), ("Threads", threads)],
        grid=(threads * (2 * k_heads[0] + v_heads[0]), num_tokens, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[
            (batch, num_tokens, *k_heads),
            (batch, num_tokens, *k_heads),
            (batch, num_tokens, *v_heads),
            (batch, num_tokens, v_heads[0]),
            (batch, num_tokens, v_heads[0]),
            conv_state.shape,
        ],
        output_dtypes=[*[mx.float32] * 5, conv_state.dtype],
    )


def gated_norm(
    y: mx.array,  # float32 [B, T, Hv, Dv]
    projected: mx.array,
    norm: mx.array,  # [Dv]
    eps: mx.array,  # float32 [1]
    *,
    k_heads: tuple[int, int],
    v_heads: tuple[int, int],
) -> mx.array:
    """-> [B, T, Hv * Dv], as `projected` has its numbers."""
    batch, num_tokens, _ = projected.shape
    threads = _whole_warps(v_heads[1])
    (out,) = _NORM_KERNEL(
        inputs=[y, projected, norm, eps],
        template=[
            ("T", projected.dtype),
            *_heads(k_heads, v_heads),
            ("Threads", threads),
        ],
        grid=(threads * v_heads[0], num_tokens, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[(batch, num_tokens, v_heads[0] * v_heads[1])],
        output_dtypes=[projected.dtype],
    )
    return out


def _heads(k_heads: tuple[int, int], v_heads: tuple[int, int]) -> list[tuple[str, int]]:
    names = ("Hk", "Dk", "Hv", "Dv")
    return list(zip(names, (*k_heads, *v_heads), strict=True))


def _whole_warps(num_threads: int) -> int:
    return -(-num_threads // 32) * 32
