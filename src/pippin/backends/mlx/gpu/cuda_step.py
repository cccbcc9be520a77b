"""One token of the gated delta rule as a single CUDA kernel; the same arithmetic as gated_delta.py.

A decode step on a GPU costs what its launches cost, and one token's gates, decay, two products and
update are seven. Metal has mlx-lm's kernel for it; this is CUDA's. One warp takes one line of a
state, [Dk], a few numbers a lane.
"""

from __future__ import annotations

import mlx.core as mx

from pippin.backends.mlx.gpu.cuda_kernel import CudaKernel

WARP = 32
LINES_PER_BLOCK = 4

_SOURCE = """
    const int lane = threadIdx.x;
    const int line = blockIdx.y * blockDim.y + threadIdx.y;  // of a state: a value channel
    const int n = blockIdx.z;                                // row and value head
    const int head = n % Hv;
    const int row = n / Hv;
    const int key_head = head / (Hv / Hk);
    constexpr int per_lane = Dk / 32;

    const float x = static_cast<float>(a[n]) + static_cast<float>(dt_bias[head]);
    const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
    const float gate = expf(-expf(static_cast<float>(A_log[head])) * softplus);
    const float beta = Beta / (1.0f + expf(-static_cast<float>(b[n])));

    const size_t state_at = (static_cast<size_t>(n) * Dv + line) * Dk + lane * per_lane;
    const size_t key_at = (static_cast<size_t>(row) * Hk + key_head) * Dk + lane * per_lane;
    const size_t value_at = static_cast<size_t>(n) * Dv + line;
    float held[per_lane], key[per_lane];
    float recalled = 0.0f;
    for (int i = 0; i < per_lane; ++i) {
      held[i] = state[state_at + i] * gate;
      key[i] = static_cast<float>(k[key_at + i]);
      recalled += held[i] * key[i];
    }
    for (int step = 16; step > 0; step /= 2) recalled += __shfl_xor_sync(~0u, recalled, step);
    const float delta = (static_cast<float>(v[value_at]) - recalled) * beta;
    float out = 0.0f;
    for (int i = 0; i < per_lane; ++i) {
      held[i] += key[i] * delta;
      out += held[i] * static_cast<float>(q[key_at + i]);
      new_state[state_at + i] = held[i];
    }
    for (int step = 16; step > 0; step /= 2) out += __shfl_xor_sync(~0u, out, step);
    if (lane == 0) y[value_at] = static_cast<T>(out);
"""


_KERNEL = CudaKernel(
    "pippin_gated_delta_step",
    input_names=["q", "k", "v", "a", "b", "A_log", "dt_bias", "state"],
    output_names=["y", "new_state"],
    source=_SOURCE,
)


def takes(k: mx.array, v: mx.array, a: mx.array) -> bool:
    """Whether the kernel is for this device and these shapes: one gate a head, whole warps."""
    whole = k.shape[-1] % WARP == 0 and v.shape[-1] % LINES_PER_BLOCK == 0
    on_cuda = mx.cuda.is_available() and mx.default_device() == mx.Device(mx.gpu)
    return bool(on_cuda) and k.shape[1] == 1 and a.ndim == 3 and whole


def gated_delta_step_cuda(
    q: mx.array,  # [B, 1, Hk, Dk]
    k: mx.array,  # [B, 1, Hk, Dk]
    v: mx.array,  # [B, 1, Hv, Dv]
    a: mx.array,  # [B, 1, Hv]
    b: mx.array,  # [B, 1, Hv]
    A_log: mx.array,  # noqa: N803  [Hv] (mlx-lm's name)
    dt_bias: mx.array,  # [Hv]
    state: mx.array,  # float32 [B, Hv, Dv, Dk]
    *,
    largest_beta: int,  # 2 where eigenvalues may be negative, else 1
) -> tuple[mx.array, mx.array]:
    batch, _, num_k_heads, k_dim = k.shape
    num_v_heads, v_dim = v.shape[2:]
    y, new_state = _KERNEL(
        inputs=[q, k, v, a, b, A_log, dt_bias, state],
        template=[
            ("T", q.dtype),
            ("Dk", k_dim),
            ("Dv", v_dim),
            ("Hk", num_k_heads),
            ("Hv", num_v_heads),
            ("Beta", largest_beta),
        ],
        grid=(WARP, v_dim, batch * num_v_heads),
        threadgroup=(WARP, LINES_PER_BLOCK, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[q.dtype, mx.float32],
    )
    return y, new_state
