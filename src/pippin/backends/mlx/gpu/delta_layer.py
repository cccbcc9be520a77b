"""One token of a Gated DeltaNet layer between its products as one Metal kernel.

    in_proj -> [ conv, silu, norms of q and k, gates, recurrence, gated norm ] -> out_proj

mlx-lm's own layer takes a dozen launches for it. Here a threadgroup takes one value head of one
row; heads that share keys each convolve them again. Any other call goes to mlx-lm's own layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.gpu.kernels import agrees, constants, off_by, run_kernel
from pippin.backends.mlx.recurrent.replay import ReplayedDeltaNet
from pippin.backends.mlx.recurrent.taps import active_taps

MOST_SIMD_GROUPS = 16  # of a threadgroup; each takes as many of a head's values
MOST_STATE = 64  # numbers of the state that a lane keeps: 32 for heads of 128

SOURCE = """
    constexpr int SHARES = Hv / Hk;  // value heads that have the same keys
    constexpr int ROUNDS = Dv / Simds;
    constexpr int PER_LANE = Dk / 32;
    constexpr int MIXED = 2 * Dk + Dv;
    constexpr int CHANNELS = 2 * Hk * Dk + Hv * Dv;
    const int me = thread_position_in_threadgroup.x;
    const int lane = me % 32;
    const int first = me / 32 * ROUNDS;  // of the values of this SIMD group
    const int head = threadgroup_position_in_grid.y;
    const int row = threadgroup_position_in_grid.z;

    // The state first: memory is far away.
    float held[ROUNDS][PER_LANE];
    _Pragma("unroll")
    for (int r = 0; r < ROUNDS; ++r)
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i)
        held[r][i] = static_cast<float>(
            state[row * state_strides[0] + head * state_strides[1]
                + (first + r) * state_strides[2] + (i * 32 + lane) * state_strides[3]]);

    // Convolution of this head's queries, keys and values. One of the heads that share keys keeps
    // their inputs for the next token.
    threadgroup float mixed[MIXED], found[Dv];
    for (int at = me; at < MIXED; at += Simds * 32) {
      const int channel = at < Dk ? head / SHARES * Dk + at
          : at < 2 * Dk ? Hk * Dk + head / SHARES * Dk + at - Dk
          : 2 * Hk * Dk + head * Dv + at - 2 * Dk;
      const bool keeps = at >= 2 * Dk || head % SHARES == 0;
      const size_t kept = static_cast<size_t>(row) * (Taps - 1) * CHANNELS + channel;
      const T now = qkv[row * qkv_strides[0] + channel * qkv_strides[2]];
      float sum = static_cast<float>(now)
          * static_cast<float>(taps[(Taps - 1) * CHANNELS + channel]);
      _Pragma("unroll")
      for (int t = 0; t < Taps - 1; ++t) {
        const T before = static_cast<T>(inputs[row * inputs_strides[0] + t * inputs_strides[1]
            + channel * inputs_strides[2]]);
        sum += static_cast<float>(before) * static_cast<float>(taps[t * CHANNELS + channel]);
        if (keeps && t > 0) new_inputs[kept + (t - 1) * CHANNELS] = before;
      }
      if (keeps) new_inputs[kept + (Taps - 2) * CHANNELS] = now;
      mixed[at] = sum / (1.0f + metal::exp(-sum));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float query[PER_LANE], key[PER_LANE];
    float query_size = 0.0f, key_size = 0.0f;
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      query[i] = mixed[i * 32 + lane];
      key[i] = mixed[Dk + i * 32 + lane];
      query_size += query[i] * query[i];
      key_size += key[i] * key[i];
    }
    query_size = metal::rsqrt((simd_sum(query_size) + 1e-6f) * Dk);
    key_size = metal::rsqrt(simd_sum(key_size) + 1e-6f);
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      query[i] *= query_size;
      key[i] *= key_size;
    }
    const float step = static_cast<float>(a[row * a_strides[0] + head * a_strides[2]])
        + static_cast<float>(dt_bias[head]);
    const float softplus = (step > 0.0f ? step : 0.0f)
        + metal::log(1.0f + metal::exp(step > 0.0f ? -step : step));
    const float fade = metal::exp(-metal::exp(static_cast<float>(A_log[head])) * softplus);
    const float beta = 1.0f
        / (1.0f + metal::exp(-static_cast<float>(b[row * b_strides[0] + head * b_strides[2]])));

    _Pragma("unroll")
    for (int r = 0; r < ROUNDS; ++r) {
      float known = 0.0f, out_sum = 0.0f;
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i) {
        held[r][i] *= fade;
        known += held[r][i] * key[i];
      }
      const float delta = (mixed[2 * Dk + first + r] - simd_sum(known)) * beta;
      const size_t at = ((static_cast<size_t>(row) * Hv + head) * Dv + first + r) * Dk + lane;
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i) {
        held[r][i] += key[i] * delta;
        out_sum += held[r][i] * query[i];
        new_state[at + i * 32] = static_cast<S>(held[r][i]);
      }
      out_sum = simd_sum(out_sum);
      if (lane == 0) found[first + r] = out_sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    float size = 0.0f;
    for (int at = lane; at < Dv; at += 32) size += found[at] * found[at];
    size = metal::rsqrt(simd_sum(size) / Dv + eps[0]);
    for (int at = me; at < Dv; at += Simds * 32) {
      const float gate = static_cast<float>(
          z[row * z_strides[0] + (head * Dv + at) * z_strides[2]]);
      out[(static_cast<size_t>(row) * Hv + head) * Dv + at] = static_cast<T>(
          found[at] * size * static_cast<float>(weight[at]) * gate / (1.0f + metal::exp(-gate)));
    }
"""


def num_simd_groups(key_dim: int, value_dim: int) -> int | None:
    """Of a threadgroup; None where lanes cannot share a head's state among them."""
    if key_dim % 32:
        return None
    simds = next(n for n in (MOST_SIMD_GROUPS, 8, 4, 2, 1) if value_dim % n == 0)
    return simds if value_dim // simds * (key_dim // 32) <= MOST_STATE else None


class KernelDeltaNet(ReplayedDeltaNet):
    """mlx-lm's layer, made over in place by `use_delta_kernel`."""

    def __call__(
        self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        y: mx.array
        if mask is not None or inputs.shape[1] != 1 or not _takes(cache):
            y = super().__call__(inputs, mask, cache)
            return y
        out, cache[0], cache[1] = self._between(inputs, *cache.cache)
        cache.advance(1)
        y = self.out_proj(out)
        return y

    def _between(self, x: mx.array, inputs: mx.array, state: mx.array) -> list[mx.array]:
        num_rows, simds = len(x), num_simd_groups(self.head_k_dim, self.head_v_dim)
        assert simds is not None, "such layers stay as they are"
        qkv = self.in_proj_qkv(x)
        return run_kernel(
            *("pippin_delta_layer", SOURCE),
            {
                "qkv": qkv,
                "z": self.in_proj_z(x),
                "b": self.in_proj_b(x),
                "a": self.in_proj_a(x),
                "inputs": inputs,
                "state": state,
                "taps": self.conv1d._taps,
                "A_log": self.A_log,
                "dt_bias": self.dt_bias,
                "weight": self.norm.weight,
                "eps": self._eps,
            },
            {
                "out": ((num_rows, 1, self.value_dim), qkv.dtype),
                "new_inputs": (inputs.shape, qkv.dtype),
                "new_state": (state.shape, state.dtype),
            },
            {
                "T": qkv.dtype,
                "S": state.dtype,
                "Simds": simds,
                "Hk": self.num_k_heads,
                "Hv": self.num_v_heads,
                "Dk": self.head_k_dim,
                "Dv": self.head_v_dim,
                "Taps": self.conv_kernel_size,
            },
            grid=(32 * simds, self.num_v_heads, num_rows),
            threads=32 * simds,
            strided=True,
        )


def _takes(cache: Any) -> bool:
    """A decode step, of which no capture wants more than its last state."""
    if type(cache) is not ArraysCache or any(entry is None for entry in cache.cache):
        return False
    return cache.lengths is None and cache.left_padding is None and active_taps() is None


def use_delta_kernel(model: Module) -> None:
    """Make over every layer that the kernel knows, if it computes right; after its convolution."""
    layers = [part for _, part in model.named_modules() if _fits(part)]
    for layer in layers:
        layer._eps = constants(layer.norm.eps)
        layer.__class__ = KernelDeltaNet
    if layers and not agrees("recurrent layers have no kernel", lambda: errors_of(layers[0])):
        for layer in layers:
            layer.__class__ = ReplayedDeltaNet


def _fits(part: Module) -> bool:
    if (
        type(part) is not ReplayedDeltaNet
        or "bias" in part.conv1d
        or part.sharding_group is not None
    ):
        return False
    return num_simd_groups(part.head_k_dim, part.head_v_dim) is not None


def errors_of(layer: KernelDeltaNet) -> list[mx.array]:
    """Of the kernel's arrays against those of mlx-lm's layer, on drawn numbers."""
    dtype = layer.norm.weight.dtype
    kept = (2, layer.conv_kernel_size - 1, layer.conv_dim)
    state = (2, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    x, inputs, held = (
        mx.random.normal(shape, key=mx.random.key(n))
        for n, shape in enumerate([(2, 1, layer.hidden_size), kept, state])
    )
    found = []
    for run in (KernelDeltaNet.__call__, ReplayedDeltaNet.__call__):
        cache: Any = ArraysCache(size=2)
        cache.cache = [inputs.astype(dtype), held]
        found.append([run(layer, x.astype(dtype), None, cache), *cache.cache])
    return list(map(off_by, *found))
