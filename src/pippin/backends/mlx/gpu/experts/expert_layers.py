"""Layers of experts: which ones a token goes to, as one Metal kernel, and what they make of it
added up as another.

    router -> [ the largest, and their weights ] -> experts -> [ weights @ results ]

Only while tokens are few: a SIMD group takes one token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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

from pippin.backends.mlx.agreement import agrees, off_by
from pippin.backends.mlx.gpu.experts.expert_choice import ExpertChoice
from pippin.backends.mlx.gpu.experts.expert_sums import added_up, biased_swiglu, errors_of_sums
from pippin.backends.mlx.gpu.experts.stacked_experts import FEWEST_SORTED, StackedGLU

Compute = Callable[[Any, mx.array], mx.array]

FEW_TOKENS = 64
GROUPED = (DeepseekV3MoE, DeepseekV32MoE, GlmMoE, Glm4MoeLiteMoE)
BY_MLX_LM = "experts are chosen by mlx-lm"


def choice_of(layer: Any) -> ExpertChoice:
    if isinstance(layer, MLPBlock):
        return ExpertChoice(layer.num_local_experts, layer.num_experts_per_tok, normed=True)
    if not isinstance(layer, GROUPED):
        return ExpertChoice(layer.num_experts, layer.top_k, normed=bool(layer.norm_topk_prob))
    gate: Any = layer.gate
    return ExpertChoice(
        *(gate.n_routed_experts, gate.top_k),
        normed=bool(gate.norm_topk_prob) and gate.top_k > 1,
        sigmoid=True,
        num_groups=gate.n_group,
        num_kept=gate.topk_group,
        factor=float(gate.routed_scaling_factor),
    )


def qwen3(layer: Any, x: mx.array) -> mx.array:
    experts, weights = choice_of(layer).choose(layer.gate(x))
    return added_up(layer.switch_mlp(x, experts), weights)


def qwen3_next(layer: Any, x: mx.array) -> mx.array:
    gate = layer.shared_expert_gate(x)
    if not has_shared(layer):
        beside: mx.array = mx.sigmoid(gate) * layer.shared_expert(x)
        return qwen3(layer, x) + beside
    experts, weights = choice_of(layer).choose(layer.gate(x), shared=gate)
    return added_up(layer.switch_mlp(x, experts), weights)


def gpt_oss(layer: Any, x: mx.array) -> mx.array:
    experts, weights = choice_of(layer).choose(layer.router(x))
    glu = layer.experts
    if type(glu) is not StackedGLU or experts.size >= FEWEST_SORTED:
        return added_up(glu(x, experts), weights)
    stacked, bias, down = glu._without_biases()
    both = stacked(mx.expand_dims(x, (-2, -3)), experts)
    limits = {"alpha": glu.activation._alpha, "limit": glu.activation._limit}
    y = down(biased_swiglu(both, bias, experts, **limits), experts).squeeze(-2)
    return added_up(y, weights, glu.down_proj.bias, experts)


def grouped(layer: Any, x: mx.array) -> mx.array:
    gate = layer.gate
    scores, bias, is_one = x @ gate.weight.T, gate.e_score_correction_bias, has_shared(layer)
    experts, weights = choice_of(layer).choose(scores, bias, shared=is_one)
    none_beside = is_one or layer.config.n_shared_experts is None
    beside = None if none_beside else layer.shared_experts(x)
    return added_up(layer.switch_mlp(x, experts), weights, beside=beside)


def has_shared(layer: Any) -> bool:
    """Whether every token's expert is the last of the others."""
    return type(layer.switch_mlp) is StackedGLU and layer.switch_mlp.has_shared


def _made_over(theirs: type[Module], compute: Compute) -> type[Module]:
    """mlx-lm's layer, with `compute` for few tokens."""

    def call(self: Any, x: mx.array) -> mx.array:
        few = self.sharding_group is None and x.size // x.shape[-1] <= FEW_TOKENS
        y: mx.array = compute(self, x) if few else theirs.__call__(self, x)
        return y

    return type(theirs.__name__, (theirs,), {"__call__": call})


COMPUTED_BY: dict[type[Module], Compute] = {
    Qwen3MoeSparseMoeBlock: qwen3,
    Qwen3NextSparseMoeBlock: qwen3_next,
    MLPBlock: gpt_oss,
    **dict.fromkeys(GROUPED, grouped),
}
OURS = {theirs: _made_over(theirs, compute) for theirs, compute in COMPUTED_BY.items()}


def use_expert_kernels(model: Module) -> None:
    """Make over every layer that the kernels are for, if they choose and add up right."""
    layers = [part for _, part in model.named_modules() if type(part) in OURS]
    choices = {choice_of(layer): layer for layer in layers}
    if not layers or not agrees(BY_MLX_LM, errors_of_sums):
        return
    right = {choice for choice, layer in choices.items() if chooses_right(choice, layer)}
    for layer in layers:
        if choice_of(layer) in right:
            layer.__class__ = OURS[type(layer)]


def chooses_right(choice: ExpertChoice, layer: Any) -> bool:
    """On drawn gates, against plain operations or the function that mlx-lm's code of this layer
    calls."""
    gates = mx.random.normal((4, choice.num_experts), key=mx.random.key(0))
    bias = mx.random.uniform(0, 0.2, (choice.num_experts,), key=mx.random.key(1))

    gate = mx.random.normal((4, 1), key=mx.random.key(2))

    def by_expert(experts: mx.array, weights: mx.array) -> mx.array:
        blank = mx.zeros((4, choice.num_experts + 1))
        return mx.put_along_axis(blank, experts.astype(mx.uint32), weights, axis=-1)

    def plain() -> tuple[mx.array, mx.array]:
        if choice.sigmoid:
            theirs = vars(sys.modules[type(layer).__module__])["group_expert_select"]
            groups = choice.num_groups, choice.num_kept, choice.factor, choice.normed
            experts, weights = theirs(gates, bias, choice.num_chosen, *groups)
            return experts, weights
        experts = mx.argsort(-gates, axis=-1)[:, : choice.num_chosen]
        weights = mx.take_along_axis(mx.softmax(gates, axis=-1), experts, axis=-1)
        return experts, weights / weights.sum(axis=-1, keepdims=True) if choice.normed else weights

    def errors() -> list[mx.array]:
        expected = by_expert(*plain())
        shared = mx.concatenate([expected[:, :-1], mx.sigmoid(gate)], axis=-1)
        return [
            off_by(by_expert(*choice.choose(gates, bias)), expected),
            off_by(by_expert(*choice.choose(gates, bias, shared=gate)), shared),
        ]

    return choice.fits and agrees(f"{BY_MLX_LM} for {choice}", errors)
