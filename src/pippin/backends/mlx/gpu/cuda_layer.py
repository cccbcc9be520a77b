"""A whole Gated DeltaNet layer's token between its two products, as one CUDA kernel.

    in_proj -> [ conv, silu, norms of q and k, gates, recurrence, gated norm ] -> out_proj

A decode step on a GPU costs what its launches cost, and the part in brackets is a dozen of them.
One block of threads takes one value head of one row, which is all that it has to know. Many tokens
take three kernels (cuda_prefill.py). The same arithmetic as mlx-lm's layer, in float32 throughout;
any other call goes to mlx-lm's own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.qwen3_5 import GatedDeltaNet

from pippin.backends.mlx.gpu.cuda_kernel import CudaKernel
from pippin.backends.mlx.gpu.cuda_prefill import gated_norm, prepare
from pippin.backends.mlx.gpu.cuda_scan import fits, gated_delta_scan
from pippin.backends.mlx.gpu.siblings import Siblings
from pippin.backends.mlx.recurrent.taps import conv_inputs_are_tapped, record_conv_input

WARP = 32
THREADS = 256

_SOURCE = """
    constexpr int K_ALL = Hk * Dk;
    constexpr int CHANNELS = 2 * K_ALL + Hv * Dv;
    constexpr int WIDTH = CHANNELS + Hv * Dv + 2 * Hv;  // qkv | z | b | a
    constexpr int PER_LANE = Dk / 32;
    const int thread = threadIdx.x;
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int num_warps = blockDim.x / 32;
    const int head = blockIdx.x % Hv;
    const int row = blockIdx.x / Hv;
    const int key_head = head / (Hv / Hk);
    const bool first = head % (Hv / Hk) == 0;  // writes what value heads of one key head share
    const auto* x = projected + static_cast<size_t>(row) * WIDTH;

    __shared__ float queries[Dk], keys[Dk], values[Dv], outputs[Dv], sums[3];

    auto convolve = [&](int channel, bool keeps) {
      const size_t at = static_cast<size_t>(row) * (Taps - 1) * CHANNELS + channel;
      float y = static_cast<float>(x[channel]) *
          static_cast<float>(taps[(Taps - 1) * CHANNELS + channel]);
      for (int i = 0; i < Taps - 1; ++i) {
        const auto past = conv_state[at + i * CHANNELS];
        y += static_cast<float>(past) * static_cast<float>(taps[i * CHANNELS + channel]);
        if (keeps && i > 0) new_conv_state[at + (i - 1) * CHANNELS] = past;
      }
      if (keeps) new_conv_state[at + (Taps - 2) * CHANNELS] = x[channel];
      return y / (1.0f + expf(-y));
    };
    auto sum_of_squares = [&](const float* numbers, int count) {
      float sum = 0.0f;
      for (int i = lane; i < count; i += 32) sum += numbers[i] * numbers[i];
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
      return sum;
    };

    for (int i = thread; i < Dk; i += blockDim.x) {
      queries[i] = convolve(key_head * Dk + i, first);
      keys[i] = convolve(K_ALL + key_head * Dk + i, first);
    }
    for (int i = thread; i < Dv; i += blockDim.x)
      values[i] = convolve(2 * K_ALL + head * Dv + i, true);
    __syncthreads();
    if (warp < 2) {
      const float sum = sum_of_squares(warp == 0 ? queries : keys, Dk);
      if (lane == 0) sums[warp] = sum;
    }
    __syncthreads();

    const float query_scale = rsqrtf(sums[0] + 1e-6f) * rsqrtf(static_cast<float>(Dk));
    const float key_scale = rsqrtf(sums[1] + 1e-6f);
    const float b = static_cast<float>(x[CHANNELS + Hv * Dv + head]);
    const float a = static_cast<float>(x[CHANNELS + Hv * Dv + Hv + head]) +
        static_cast<float>(dt_bias[head]);
    const float softplus = fmaxf(a, 0.0f) + log1pf(expf(-fabsf(a)));
    const float gate = expf(-expf(static_cast<float>(A_log[head])) * softplus);
    const float beta = 1.0f / (1.0f + expf(-b));

    float key[PER_LANE], query[PER_LANE];
    for (int i = 0; i < PER_LANE; ++i) {
      key[i] = keys[i * 32 + lane] * key_scale;
      query[i] = queries[i * 32 + lane] * query_scale;
    }
    for (int line = warp; line < Dv; line += num_warps) {
      const size_t at = (static_cast<size_t>(blockIdx.x) * Dv + line) * Dk + lane;
      float held[PER_LANE];
      float recalled = 0.0f;
      for (int i = 0; i < PER_LANE; ++i) {
        held[i] = state[at + i * 32] * gate;
        recalled += held[i] * key[i];
      }
      for (int step = 16; step > 0; step /= 2) recalled += __shfl_xor_sync(~0u, recalled, step);
      const float delta = (values[line] - recalled) * beta;
      float y = 0.0f;
      for (int i = 0; i < PER_LANE; ++i) {
        held[i] += key[i] * delta;
        y += held[i] * query[i];
        new_state[at + i * 32] = held[i];
      }
      for (int step = 16; step > 0; step /= 2) y += __shfl_xor_sync(~0u, y, step);
      if (lane == 0) outputs[line] = y;
    }
    __syncthreads();
    if (warp == 0) {
      const float sum = sum_of_squares(outputs, Dv);
      if (lane == 0) sums[2] = sum;
    }
    __syncthreads();
    const float scale = rsqrtf(sums[2] / Dv + eps[0]);
    for (int i = thread; i < Dv; i += blockDim.x) {
      const float z = static_cast<float>(x[CHANNELS + head * Dv + i]);
      const float y = outputs[i] * scale * static_cast<float>(norm[i]);
      out[(static_cast<size_t>(row) * Hv + head) * Dv + i] =
          static_cast<T>(y * z / (1.0f + expf(-z)));
    }
"""


_KERNEL = CudaKernel(
    "pippin_gated_delta_layer",
    input_names=["projected", "conv_state", "taps", "A_log", "dt_bias", "norm", "eps", "state"],
    output_names=["out", "new_conv_state", "new_state"],
    source=_SOURCE,
)


class FusedGatedDeltaNet(GatedDeltaNet):
    """mlx-lm's layer, made over in place by `fuse_layers`."""

    _in_proj: Siblings
    _eps: mx.array

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        y: mx.array
        if cache is None or self.sharding_group is not None:
            y = super().__call__(inputs, mask, cache)
        elif inputs.shape[1] > 1:
            y = self._many_tokens(inputs, cache)
        elif mask is None and cache[1] is not None and cache.lengths is None:
            y = self._one_token(inputs, cache)
        else:
            y = super().__call__(inputs, mask, cache)
        return y

    def _one_token(self, inputs: mx.array, cache: Any) -> mx.array:
        batch, state = inputs.shape[0], cache[1]
        out, cache[0], cache[1] = _KERNEL(
            inputs=[
                self._in_proj.whole(inputs),
                cache[0],
                self.conv1d._taps,
                self.A_log,
                self.dt_bias,
                self.norm.weight,
                self._eps,
                state,
            ],
            template=[
                ("T", inputs.dtype),
                ("Dk", self.head_k_dim),
                ("Dv", self.head_v_dim),
                ("Hk", self.num_k_heads),
                ("Hv", self.num_v_heads),
                ("Taps", self.conv_kernel_size),
            ],
            grid=(THREADS * batch * self.num_v_heads, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(batch, 1, self.value_dim), cache[0].shape, state.shape],
            output_dtypes=[inputs.dtype, cache[0].dtype, mx.float32],
        )
        cache.advance(1)
        y: mx.array = self.out_proj(out)
        return y

    def _many_tokens(self, inputs: mx.array, cache: Any) -> mx.array:
        """Rows are masked by their lengths, which the cache has; all are whole if it has none."""
        batch, num_tokens, _ = inputs.shape
        k_heads = self.num_k_heads, self.head_k_dim
        v_heads = self.num_v_heads, self.head_v_dim
        projected = self._in_proj.whole(inputs)
        conv_state, state = cache[0], cache[1]
        if conv_state is None:
            kept = self.conv_kernel_size - 1
            conv_state = mx.zeros((batch, kept, self.conv_dim), inputs.dtype)
        if state is None:
            state = mx.zeros((batch, *v_heads, self.head_k_dim), mx.float32)
        lengths = cache.lengths
        if lengths is None:
            lengths = mx.full((batch,), num_tokens, mx.int32)
        if conv_inputs_are_tapped():
            record_conv_input(mx.concatenate([conv_state, projected[..., : self.conv_dim]], axis=1))
        q, k, v, g, beta, cache[0] = prepare(
            projected,
            conv_state,
            self.conv1d._taps,
            self.A_log,
            self.dt_bias,
            lengths,
            k_heads=k_heads,
            v_heads=v_heads,
        )
        read, cache[1] = gated_delta_scan(q, k, v, g, beta, state, dtype=mx.float32)
        cache.advance(num_tokens)
        out = gated_norm(
            read, projected, self.norm.weight, self._eps, k_heads=k_heads, v_heads=v_heads
        )
        y: mx.array = self.out_proj(out)
        return y


def fuse_layers(model: Module) -> None:
    """Make every layer over that has the form which the kernel knows, and whole warps of channels.

    To be called after sibling layers have been merged, on CUDA.
    """
    for _, part in model.named_modules():
        if type(part) is not GatedDeltaNet or part.head_k_dim % WARP:
            continue
        if not fits(part.head_k_dim, part.head_v_dim):
            continue
        siblings = Siblings.of(part.in_proj_qkv)
        wanted = [part.in_proj_qkv, part.in_proj_z, part.in_proj_b, part.in_proj_a]
        biased = any("bias" in linear for linear in (*wanted, part.conv1d))
        if siblings is None or biased or not siblings.are(wanted):
            continue
        part._in_proj = siblings
        part._eps = mx.array([part.norm.eps], dtype=mx.float32)
        part.__class__ = FusedGatedDeltaNet
