"""Which experts a token goes to, and by what weights, as one Metal kernel. Knows no layers.

    router -> softmax         -> [ the largest ]
    router -> sigmoid, + bias -> [ the best groups, by two largest ] -> [ the largest of them ]

mlx-lm takes five launches for the first kind and up to a dozen for the second one, which DeepSeek
V3 and the GLM-4.5s have. A SIMD group takes one token. A bias chooses, and weighs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from pippin.backends.mlx.gpu.kernels import constants, run_kernel

MOST_EXPERTS = 32 * 32  # a lane keeps one in 32 of the scores

SOURCE = """
    constexpr int PER_LANE = (Experts + 31) / 32;
    constexpr int GROUP = Experts / Groups;
    constexpr int WIDTH = Chosen + (Shared > 0);
    constexpr float LEAST = -3e38f;
    const int lane = thread_position_in_threadgroup.x;
    const int token = threadgroup_position_in_grid.y;
    float share[PER_LANE], score[PER_LANE];
    float highest = LEAST;
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      score[i] = LEAST;
      if (expert < Experts)
        score[i] = static_cast<float>(
            gates[token * gates_strides[0] + expert * gates_strides[1]]);
      highest = score[i] > highest ? score[i] : highest;
    }
    highest = simd_max(highest);
    float total = 0.0f;
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      const bool is_one = expert < Experts;
      if (Sigmoid) {
        share[i] = 1.0f / (1.0f + metal::exp(-score[i]));
        score[i] = is_one ? share[i] + static_cast<float>(bias[expert]) : LEAST;
      } else {
        share[i] = is_one ? metal::exp(score[i] - highest) : 0.0f;
        if (!Normed) total += share[i];  // weights are shares among all experts
      }
    }
    total = simd_sum(total);
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
    float own = 0.0f;
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
      if (Normed) total += weight;
      if (lane == n) {
        own = weight;
        experts[token * WIDTH + n] = chosen;
      }
    }
    if (Normed || !Sigmoid) own /= total;
    if (lane < Chosen) weights[token * WIDTH + lane] = static_cast<W>(own * factor[0]);
    if (Shared > 0 && lane == 0) {  // the one behind all others
      const float gate = static_cast<float>(shared[token * shared_strides[0]]);
      experts[token * WIDTH + Chosen] = Experts;
      weights[token * WIDTH + Chosen] =
          static_cast<W>(Shared == 1 ? 1.0f : 1.0f / (1.0f + metal::exp(-gate)));
    }
"""


@dataclass(frozen=True)
class ExpertChoice:
    """How a layer chooses, but for its bias."""

    num_experts: int
    num_chosen: int
    normed: bool  # weights are shares among those that are chosen
    sigmoid: bool = False  # of each score by itself; else a softmax
    num_groups: int = 1
    num_kept: int = 1  # of the groups
    factor: float = 1.0

    @property
    def fits(self) -> bool:
        whole = self.num_experts % self.num_groups == 0 and self.num_groups <= 32
        return whole and self.num_experts <= MOST_EXPERTS and self.num_chosen <= 32

    def choose(
        self,
        gates: mx.array,
        bias: mx.array | None = None,
        *,
        shared: mx.array | bool = False,
    ) -> tuple[mx.array, mx.array]:
        """gates [..., experts] -> uint32 [..., chosen] and weights: float32 of a sigmoid, else of
        the gates' type. No expert is chosen twice, whatever the gates are. `shared`: whether
        another one follows, behind all of them, of weight 1 or of a sigmoid of [..., 1]."""
        *shape, num_experts = gates.shape
        shape.append(self.num_chosen + (shared is not False))
        gate = shared.reshape(-1, 1) if isinstance(shared, mx.array) else None
        weight_type = mx.float32 if self.sigmoid else gates.dtype
        experts, weights = run_kernel(
            *("pippin_choose_experts", SOURCE),
            {
                "gates": gates.reshape(-1, num_experts),
                "bias": bias,
                "factor": constants(self.factor),
                "shared": gate,
            },
            {"experts": (shape, mx.uint32), "weights": (shape, weight_type)},
            {
                "W": weight_type,
                "Experts": num_experts,
                "Chosen": self.num_chosen,
                "Groups": self.num_groups,
                "Dropped": self.num_groups - self.num_kept,
                "Sigmoid": self.sigmoid,
                "Normed": self.normed,
                "Shared": int(bool(shared)) if gate is None else 2,
            },
            grid=(32, gates.size // num_experts, 1),
            threads=32,
            strided=True,
        )
        return experts, weights
