"""Layers of experts: which ones a token goes to, as one Metal kernel, and what they make of it
added up as another.

    router -> [ the largest, and their weights ] -> experts -> [ weights @ results ]

mlx-lm's layers take five launches to choose and two to add up. Only while tokens are few: a SIMD
group takes one token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.deepseek_v3 import DeepseekV3MoE
from mlx_lm.models.deepseek_v32 import DeepseekV32MoE
from mlx_lm.models.glm4_moe import MoE as GlmMoE
from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteMoE
from mlx_lm.models.gpt_oss import MLPBlock
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock

from pippin.backends.mlx.gpu.expert_sums import added_up, adds_up_right, biased_swiglu
from pippin.backends.mlx.gpu.grouped_experts import GroupedChoice
from pippin.backends.mlx.gpu.stacked_experts import FEWEST_SORTED, StackedGLU
from pippin.backends.mlx.layout import ROUNDING

FEW_TOKENS = 64
MOST_EXPERTS = 32 * 32  # a lane keeps one in 32 of the scores

logger = logging.getLogger(__name__)

SOURCE = """
    constexpr int PER_LANE = (Experts + 31) / 32;
    constexpr float LEAST = -3e38f;
    const int lane = thread_position_in_threadgroup.x;
    const int token = threadgroup_position_in_grid.y;
    float score[PER_LANE];
    float highest = LEAST;
    _Pragma("unroll")
    for (int i = 0; i < PER_LANE; ++i) {
      const int expert = i * 32 + lane;
      score[i] = expert < Experts ? static_cast<float>(scores[token * Experts + expert]) : LEAST;
      highest = score[i] > highest ? score[i] : highest;
    }
    highest = simd_max(highest);
    float total = 0.0f;
    if (!Among) {  // weights are shares among all experts, not among those that are chosen
      _Pragma("unroll")
      for (int i = 0; i < PER_LANE; ++i) total += metal::exp(score[i] - highest);
      total = simd_sum(total);
    }
    uint taken = 0;  // of this lane's experts, a bit each
    float own = 0.0f;
    for (int n = 0; n < Chosen; ++n) {
      // What is not a number is never the largest: then it is the first that is left.
      float best = LEAST;
      int at = Experts;
      _Pragma("unroll")
      for (int i = PER_LANE - 1; i >= 0; --i) {
        const bool is_left = i * 32 + lane < Experts && !(taken >> i & 1);
        if (is_left && (at == Experts || score[i] >= best)) {
          best = score[i] > LEAST ? score[i] : LEAST;
          at = i * 32 + lane;
        }
      }
      const float top = simd_max(best);
      const int chosen = simd_min(best == top ? at : Experts);
      if (chosen % 32 == lane) taken |= 1u << (chosen / 32);
      const float weight = metal::exp(top - highest);
      if (Among) total += weight;
      if (lane == n) {
        own = weight;
        experts[token * Chosen + n] = chosen;
      }
    }
    if (lane < Chosen) weights[token * Chosen + lane] = static_cast<T>(own / total);
"""


@cache
def _kernel() -> Callable[..., list[mx.array]]:
    make: Callable[..., Any] = mx.fast.metal_kernel
    kernel: Callable[..., list[mx.array]] = make(
        name="pippin_choose_experts",
        input_names=["scores"],
        output_names=["experts", "weights"],
        source=SOURCE,
    )
    return kernel


def choose_experts(scores: mx.array, num_chosen: int, *, among: bool) -> tuple[mx.array, mx.array]:
    """Of scores [..., experts] the largest, uint32 [..., chosen], and their softmax: `among`
    themselves, or of all. No expert is chosen twice, whatever the scores are."""
    *shape, num_experts = scores.shape
    num_tokens = scores.size // num_experts
    experts, weights = _kernel()(
        inputs=[scores],
        template=[
            *(("T", scores.dtype), ("Experts", num_experts), ("Chosen", num_chosen)),
            ("Among", among),
        ],
        grid=(32, num_tokens, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(*shape, num_chosen)] * 2,
        output_dtypes=[mx.uint32, scores.dtype],
    )
    return experts, weights


class Qwen3Experts(Qwen3MoeSparseMoeBlock):
    """mlx-lm's layer, made over in place by `use_expert_kernel`, and so are the others."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if not _takes(self, x):
            y = super().__call__(x)
            return y
        experts, weights = choose_experts(self.gate(x), self.top_k, among=self.norm_topk_prob)
        return added_up(self.switch_mlp(x, experts), weights)


class Qwen3NextExperts(Qwen3NextSparseMoeBlock):
    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if not _takes(self, x):
            y = super().__call__(x)
            return y
        experts, weights = choose_experts(self.gate(x), self.top_k, among=self.norm_topk_prob)
        shared = mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        y = added_up(self.switch_mlp(x, experts), weights) + shared
        return y


class GptOssExperts(MLPBlock):
    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if not _takes(self, x):
            y = super().__call__(x)
            return y
        experts, weights = choose_experts(self.router(x), self.num_experts_per_tok, among=True)
        if type(self.experts) is not StackedGLU or experts.size >= FEWEST_SORTED:
            return added_up(self.experts(x, experts), weights)
        stacked, bias, down = self.experts._without_biases()
        limits = {"alpha": self.experts.activation._alpha, "limit": self.experts.activation._limit}
        both = stacked(mx.expand_dims(x, (-2, -3)), experts)
        y = down(biased_swiglu(both, bias, experts, **limits), experts).squeeze(-2)
        return added_up(y, weights, self.experts.down_proj.bias, experts)


class GroupedExperts:
    """Of a layer that mlx-lm has written once for each of these families."""

    def __call__(self: Any, x: mx.array) -> mx.array:
        y: mx.array
        if not _takes(self, x):
            y = super().__call__(x)  # type: ignore[misc]
            return y
        gate = self.gate
        scores = x @ gate.weight.T
        experts, weights = GroupedChoice.of(self).choose(scores, gate.e_score_correction_bias)
        shared = None if self.config.n_shared_experts is None else self.shared_experts(x)
        y = added_up(self.switch_mlp(x, experts), weights, beside=shared)
        return y


GROUPED = (DeepseekV3MoE, DeepseekV32MoE, GlmMoE, Glm4MoeLiteMoE)
OURS: dict[type[Module], type[Module]] = {
    Qwen3MoeSparseMoeBlock: Qwen3Experts,
    Qwen3NextSparseMoeBlock: Qwen3NextExperts,
    MLPBlock: GptOssExperts,
    **{theirs: type(theirs.__name__, (GroupedExperts, theirs), {}) for theirs in GROUPED},
}


def _takes(layer: Any, x: mx.array) -> bool:
    return layer.sharding_group is None and x.size // x.shape[-1] <= FEW_TOKENS


def use_expert_kernel(model: Module) -> None:
    """Make over every layer that the kernels are for, if they choose and add up right."""
    layers = [part for _, part in model.named_modules() if type(part) in OURS]
    choices = {_choice(layer): layer for layer in layers}
    try:
        off = [choice for choice, layer in choices.items() if not _is_right(choice, layer)]
        adds_up = all(map(adds_up_right, (mx.float32, mx.bfloat16))) if layers else True
    except Exception as failure:  # whatever a kernel can do on a machine that we have never seen
        logger.warning("experts are chosen by mlx-lm: %s", failure, exc_info=failure)
        return
    if not adds_up:
        logger.warning("experts are chosen by mlx-lm: the kernel that adds them up is off")
        return
    for choice in off:
        logger.warning("experts are chosen by mlx-lm: the kernel is off for %s", choice)
    for layer in layers:
        if _choice(layer) not in off:
            layer.__class__ = OURS[type(layer)]


def _choice(layer: Any) -> GroupedChoice | tuple[int, int]:
    """How it chooses: for those without groups, of how many experts how many."""
    if isinstance(layer, GROUPED):
        return GroupedChoice.of(layer)
    if isinstance(layer, MLPBlock):
        return layer.num_local_experts, layer.num_experts_per_tok
    return layer.num_experts, layer.top_k


def _is_right(choice: GroupedChoice | tuple[int, int], layer: Any) -> bool:
    if isinstance(choice, GroupedChoice):
        return choice.chooses_right(layer)
    return chooses_right(*choice)


def chooses_right(num_experts: int, num_chosen: int) -> bool:
    """On drawn scores, against a sort."""
    if num_experts > MOST_EXPERTS or num_chosen > 32:
        return False
    scores = mx.random.normal((3, num_experts), key=mx.random.key(0))
    largest = mx.argsort(-scores, axis=-1)[:, :num_chosen]
    for among in (True, False):
        experts, weights = choose_experts(scores, num_chosen, among=among)
        plain = mx.take_along_axis(mx.softmax(scores, axis=-1), largest, axis=-1)
        plain = plain / plain.sum(axis=-1, keepdims=True) if among else plain
        if not mx.array_equal(experts, largest) or not mx.allclose(weights, plain, rtol=ROUNDING):
            return False
    return True
