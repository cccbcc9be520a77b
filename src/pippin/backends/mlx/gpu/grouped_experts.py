"""Which experts a token goes to where they are in groups, as one Metal kernel. Knows no weights.

    router -> sigmoid, bias -> [ the best groups: by their two largest ] -> [ the largest of these ]

As DeepSeek V3 and the GLM-4.5s choose them; mlx-lm takes up to a dozen launches. A SIMD group takes
one token. A bias chooses, and weighs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.layout import ROUNDING

SOURCE = """
    constexpr int PER_LANE = (Experts + 31) / 32;
    constexpr int GROUP = Experts / Groups;
    constexpr float LEAST = -3e38f;
    const int lane = thread_position_in_threadgroup.x;
    const int token = threadgroup_position_in_grid.y;
    float share[PER_LANE], score[PER_LANE];
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      const bool is_one = expert < Experts;
      const float gate = is_one ? static_cast<float>(gates[token * Experts + expert]) : 0.0f;
      share[i] = 1.0f / (1.0f + metal::exp(-gate));
      score[i] = is_one ? share[i] + static_cast<float>(bias[expert]) : LEAST;
    }
    if (Dropped > 0) {
      float own = 0.0f;  // of the group whose number is this lane's
      for (int group = 0; group < Groups; ++group) {
        float both = 0.0f;
        int first = Experts;
        for (int n = 0; n < 2; ++n) {
          float best = LEAST;
          int at = Experts;
          _Pragma("unroll")
          for (int i = PER_LANE - 1; i >= 0; --i) {
            const int expert = i * 32 + lane;
            if (expert / GROUP == group && expert != first && score[i] >= best) {
              best = score[i];
              at = expert;
            }
          }
          const float top = simd_max(best);
          both += top;
          first = simd_min(best == top ? at : Experts);
        }
        if (lane == group) own = both;
      }
      int num_below = 0;
      for (int group = 0; group < Groups; ++group) {
        const float other = simd_shuffle(own, group);
        if (other < own || (other == own && group < lane)) ++num_below;
      }
      const uint dropped = simd_or(lane < Groups && num_below < Dropped ? 1u << lane : 0u);
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i)
        if (i * 32 + lane < Experts && (dropped >> ((i * 32 + lane) / GROUP) & 1)) score[i] = 0.0f;
    }
    uint taken = 0;  // of this lane's experts, a bit each
    float own = 0.0f, total = 0.0f;
    for (int n = 0; n < Chosen; ++n) {
      // What is not a number is never the largest: then it is the first that is left.
      float best = LEAST, weight = 0.0f;
      int at = Experts;
      _Pragma("unroll")
      for (int i = PER_LANE - 1; i >= 0; --i) {
        const bool is_left = i * 32 + lane < Experts && !(taken >> i & 1);
        if (is_left && (at == Experts || score[i] >= best)) {
          best = score[i] > LEAST ? score[i] : LEAST;
          at = i * 32 + lane;
          weight = share[i];
        }
      }
      const float top = simd_max(best);
      const int chosen = simd_min(best == top ? at : Experts);
      if (chosen % 32 == lane) taken |= 1u << (chosen / 32);
      weight = simd_shuffle(weight, chosen % 32);
      total += weight;
      if (lane == n) {
        own = weight;
        experts[token * Chosen + n] = chosen;
      }
    }
    if (lane < Chosen)
      weights[token * Chosen + lane] = (Normed ? own / total : own) * factor[0];
"""


@dataclass(frozen=True)
class GroupedChoice:
    """How a layer chooses, but for its bias."""

    num_experts: int
    num_chosen: int
    num_groups: int
    num_kept: int  # groups
    factor: float
    normed: bool

    @classmethod
    def of(cls, layer: Any) -> GroupedChoice:
        gate = layer.gate
        return cls(
            gate.n_routed_experts,
            gate.top_k,
            gate.n_group,
            gate.topk_group,
            float(gate.routed_scaling_factor),
            bool(gate.norm_topk_prob) and gate.top_k > 1,
        )

    @property
    def fits(self) -> bool:
        whole = self.num_experts % self.num_groups == 0 and self.num_groups <= 32
        return whole and self.num_experts <= 1024 and self.num_chosen <= 32

    def choose(self, gates: mx.array, bias: mx.array) -> tuple[mx.array, mx.array]:
        """gates [..., experts] -> uint32 and float32 [..., chosen]. No expert is chosen twice,
        whatever the gates are."""
        *shape, num_experts = gates.shape
        experts, weights = _kernel()(
            inputs=[gates, bias, _number(self.factor)],
            template=[
                *(("Experts", num_experts), ("Chosen", self.num_chosen)),
                *(("Groups", self.num_groups), ("Dropped", self.num_groups - self.num_kept)),
                ("Normed", self.normed),
            ],
            grid=(32, gates.size // num_experts, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(*shape, self.num_chosen)] * 2,
            output_dtypes=[mx.uint32, mx.float32],
        )
        return experts, weights

    def chooses_right(self, layer: Any) -> bool:
        """On drawn gates, as the function does that mlx-lm's code of this layer calls."""
        if not self.fits:
            return False
        theirs = vars(sys.modules[type(layer).__module__])["group_expert_select"]
        gates = mx.random.normal((4, self.num_experts), key=mx.random.key(0))
        bias = mx.random.uniform(0, 0.2, (self.num_experts,), key=mx.random.key(1))
        by_expert = []
        settings = self.num_chosen, self.num_groups, self.num_kept, self.factor, self.normed
        for experts, weights in (self.choose(gates, bias), theirs(gates, bias, *settings)):
            none = mx.zeros(gates.shape)
            by_expert.append(mx.put_along_axis(none, experts.astype(mx.uint32), weights, axis=-1))
        ours, plain = by_expert
        return bool(mx.allclose(ours, plain, rtol=ROUNDING))


@cache
def _kernel() -> Callable[..., list[mx.array]]:
    make: Callable[..., Any] = mx.fast.metal_kernel
    kernel: Callable[..., list[mx.array]] = make(
        name="pippin_choose_grouped_experts",
        input_names=["gates", "bias", "factor"],
        output_names=["experts", "weights"],
        source=SOURCE,
    )
    return kernel


@cache
def _number(value: float) -> mx.array:
    number = mx.array([value])
    mx.eval(number)
    return number
