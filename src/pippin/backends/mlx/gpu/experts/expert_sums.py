"""What a token's experts make of it, as one Metal kernel each: added up, and gpt-oss's activation.

Biases are of the experts that were chosen, so plain operations gather them first: a launch, and
another one to add them. Knows no weights of experts and no layers.
"""

from __future__ import annotations

import math

import mlx.core as mx
from mlx_lm.models.activations import swiglu_oai

from pippin.backends.mlx.agreement import off_by
from pippin.backends.mlx.gpu.kernels import constants, run_kernel

THREADS = 256

ADD_UP = """
    const int c = thread_position_in_grid.x;
    const int token = thread_position_in_grid.y;
    float sum = 0.0f;
    for (int n = 0; n < Chosen; ++n) {
      const int at = token * Chosen + n;
      float result = static_cast<float>(results[static_cast<size_t>(at) * Size + c]);
      if (Biased) result += static_cast<float>(bias[static_cast<size_t>(experts[at]) * Size + c]);
      sum += static_cast<float>(weights[at]) * result;
    }
    if (Beside) sum += static_cast<float>(beside[static_cast<size_t>(token) * Size + c]);
    out[static_cast<size_t>(token) * Size + c] = static_cast<T>(sum);
"""

# A row of `both` and of `bias`: what is linear, then the gate.
ACTIVATE = """
    const int c = thread_position_in_grid.x;
    const int at = thread_position_in_grid.y;  // an expert of a token
    const size_t from = static_cast<size_t>(at) * 2 * Size + c;
    const size_t own = static_cast<size_t>(experts[at]) * 2 * Size + c;
    float x = static_cast<float>(both[from]) + static_cast<float>(bias[own]);
    float gate = static_cast<float>(both[from + Size]) + static_cast<float>(bias[own + Size]);
    // `min` and `max` give a number where one of two is none.
    x = x > limits[1] ? limits[1] : x < -limits[1] ? -limits[1] : x;
    gate = gate > limits[1] ? limits[1] : gate;
    const float share = 1.0f / (1.0f + metal::exp(-limits[0] * gate));
    out[static_cast<size_t>(at) * Size + c] = static_cast<T>((x + 1.0f) * gate * share);
"""


def added_up(
    results: mx.array,
    weights: mx.array,
    bias: mx.array | None = None,
    experts: mx.array | None = None,
    beside: mx.array | None = None,
) -> mx.array:
    """results [..., chosen, n], weights [..., chosen] -> [..., n]; with the bias [experts, n] of
    each expert and what is `beside` them [..., n], if there is any."""
    *shape, num_chosen, size = results.shape
    (out,) = run_kernel(
        *("pippin_add_up_experts", ADD_UP),
        {
            "results": results,
            "weights": weights,
            "bias": bias,
            "experts": experts,
            "beside": beside,
        },
        {"out": ((*shape, size), results.dtype)},
        {
            "T": results.dtype,
            "Chosen": num_chosen,
            "Size": size,
            "Biased": bias is not None,
            "Beside": beside is not None,
        },
        grid=(size, math.prod(shape), 1),
        threads=THREADS,
    )
    return out


def biased_swiglu(
    both: mx.array, bias: mx.array, experts: mx.array, *, alpha: float, limit: float
) -> mx.array:
    """gpt-oss's: both [..., chosen, 1, 2n] and bias [experts, 2n], what is linear and then the
    gate; experts [..., chosen] -> [..., chosen, 1, n]"""
    *shape, double = both.shape
    (out,) = run_kernel(
        *("pippin_swiglu_of_experts", ACTIVATE),
        {"both": both, "bias": bias, "experts": experts, "limits": constants(alpha, limit)},
        {"out": ((*shape, double // 2), both.dtype)},
        {"T": both.dtype, "Size": double // 2},
        grid=(double // 2, experts.size, 1),
        threads=THREADS,
    )
    return out


def errors_of_sums() -> list[mx.array]:
    """On drawn numbers, against plain operations."""
    return [error for dtype in (mx.float32, mx.bfloat16) for error in _errors(dtype)]


def _errors(dtype: mx.Dtype) -> list[mx.array]:
    shape, num_experts, size = (3, 1, 4), 6, 96

    def draw(*extents: int) -> mx.array:
        return mx.random.normal(extents, key=mx.random.key(sum(extents))).astype(dtype)

    experts = mx.arange(math.prod(shape), dtype=mx.uint32).reshape(shape) % num_experts
    results, bias, beside = draw(*shape, size), draw(num_experts, size), draw(*shape[:-1], size)
    weights = mx.softmax(draw(*shape).astype(mx.float32), axis=-1)
    both, wide = 4 * draw(*shape, 1, 2 * size), draw(num_experts, 2 * size)
    x, gate = mx.split((both + wide[experts][..., None, :]).astype(mx.float32), 2, axis=-1)
    biased = (results + bias[experts]) * weights[..., None]
    return [
        off_by(
            added_up(results, weights, beside=beside),
            (results * weights[..., None]).sum(axis=-2) + beside,
        ),
        off_by(added_up(results, weights, bias, experts), biased.sum(axis=-2)),
        off_by(biased_swiglu(both, wide, experts, alpha=1.702, limit=7.0), swiglu_oai(gate, x)),
    ]
