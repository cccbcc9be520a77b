"""Layers of experts on Metal, while tokens are few: a SIMD group takes one token.

    router -> softmax         -> [ the largest ]                               one kernel
    router -> sigmoid, + bias -> [ the best groups ] -> [ the largest of them ]  likewise
    experts, both products of an input as one -> [ weights @ results ]         one kernel

mlx-lm takes five launches for the first kind of choice and up to a dozen for the second one, which
DeepSeek V3 and the GLM-4.5s have; and mlx numbers the rows of a product with experts' weights
itself, in every call, where it is not given the numbers.

Slices of stacked experts do not lie in one piece, so a prompt's chunk takes both products at once,
too. An expert that every token has beside those that are chosen for it is the last of them, where
it is like them: its number is that of the experts before it, which mlx-lm's own code never asks
for. The layers' own weights become slices of what is stacked, and nothing is stored twice.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.activations import swiglu_oai
from mlx_lm.models.deepseek_v3 import DeepseekV3MoE
from mlx_lm.models.deepseek_v32 import DeepseekV32MoE
from mlx_lm.models.glm4_moe import MoE as GlmMoE
from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteMoE
from mlx_lm.models.gpt_oss import MLPBlock
from mlx_lm.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from mlx_lm.models.qwen3_next import Qwen3NextSparseMoeBlock
from mlx_lm.models.switch_layers import (
    QuantizedSwitchLinear,
    SwiGLU,
    SwitchGLU,
    SwitchLinear,
    _gather_sort,
    _scatter_unsort,
)

from pippin.backends.mlx.gpu.kernels import agrees, constants, off_by, run_kernel
from pippin.backends.mlx.linear_groups import STACKED, likeness, share_product, stack

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


MOST_SHAPES = 64  # that are remembered
_gather_mm, _gather_qmm = mx.gather_mm, mx.gather_qmm


def gather_mm(a: mx.array, b: mx.array, /, *args: Any, **options: Any) -> mx.array:
    """Drop-in for `mx.gather_mm`."""
    return _gather_mm(a, b, *args, **_numbered(a, args, options))


def gather_qmm(x: mx.array, w: mx.array, /, *args: Any, **options: Any) -> mx.array:
    """Drop-in for `mx.gather_qmm`."""
    # scales and biases come first
    return _gather_qmm(x, w, *args, **_numbered(x, args[2:], options))


def _numbered(x: mx.array, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """mlx has a faster product for rows sorted by expert, if it numbers them itself."""
    if args or options.get("lhs_indices") is not None or options.get("sorted_indices"):
        return options
    return {**options, "lhs_indices": _row_numbers(tuple(x.shape[:-2]))}


@lru_cache(MOST_SHAPES)
def _row_numbers(shape: tuple[int, ...]) -> mx.array:
    numbers = mx.arange(prod(shape), dtype=mx.uint32).reshape(shape)
    mx.eval(numbers)
    return numbers


FEWEST_SORTED = 64  # experts of all tokens: mlx-lm sorts so many, and rows by them
LIKE_EXPERTS: dict[type[Any], type[Any]] = {
    Linear: SwitchLinear,
    QuantizedLinear: QuantizedSwitchLinear,
}
PRODUCTS = ("up_proj", "gate_proj", "down_proj")


class StackedGLU(SwitchGLU):
    """mlx-lm's layer, made over in place by `stack_experts`."""

    has_shared: bool  # whether the last expert is every token's

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        x = mx.expand_dims(x, (-2, -3))
        is_sorted = indices.size >= FEWEST_SORTED
        chosen, inverse = indices, None
        if is_sorted:
            x, chosen, inverse = _gather_sort(x, indices)
        both = self._both(x, chosen, sorted_indices=is_sorted)
        linear, gate = mx.split(both, 2, axis=-1)
        x = self._down(self.activation(linear, gate), chosen, sorted_indices=is_sorted)
        if is_sorted:
            x = _scatter_unsort(x, inverse, indices.shape)
        return x.squeeze(-2)


def stack_experts(model: Module) -> None:
    """Change its layers in place."""
    parts = [part for _, part in model.named_modules()]
    shared = {id(part["switch_mlp"]): _shared_of(part) for part in parts if "switch_mlp" in part}
    for part in parts:
        if type(part) is SwitchGLU and _likeness(part.up_proj) == _likeness(part.gate_proj):
            _stack(part, shared.get(id(part)))
            mx.clear_cache()  # of what was stacked: layers of experts are most of a model


def without_bias(part: Any) -> Any:
    """The same product, where something else adds the bias."""
    product = copy(part)
    product.pop("bias", None)
    return product


def _shared_of(layer: Any) -> Any:
    """The expert that every token of the layer has, if it is like the others."""
    glu, shared = layer.switch_mlp, layer.get("shared_expert") or layer.get("shared_experts")
    if shared is None or type(glu.activation) is not SwiGLU:
        return None
    if set(shared.children()) != set(PRODUCTS):
        return None
    alike = all(_likeness(_as_expert(shared[n])) == _likeness(glu[n]) for n in PRODUCTS)
    return shared if alike else None


def _as_expert(part: Any) -> Any:
    """A linear layer as the only one of a layer of experts."""
    one = copy(part)
    one.__class__ = LIKE_EXPERTS.get(type(part), type(part))
    for name in STACKED:
        if part.get(name) is not None:
            one[name] = part[name][None]
    return one


def _likeness(part: Any) -> object:
    """Layers that differ in it cannot be stacked."""
    known = type(part) in LIKE_EXPERTS.values() and part.get("global_scale") is None
    return likeness(part) if known else part  # which is like no other one


def _stack(layer: Any, shared: Any) -> None:
    wholes = {name: layer[name] for name in PRODUCTS}
    if shared is not None:
        wholes = {name: stack([layer[name], _as_expert(shared[name])]) for name in PRODUCTS}
    both = stack([wholes["up_proj"], wholes["gate_proj"]], axis=1)
    if shared is not None:
        _split_off(shared, layer, wholes, both)
    # In functions: a module in it would be one of the model's.
    down = wholes["down_proj"]
    layer._both = lambda x, chosen, **options: both(x, chosen, **options)
    layer._down = lambda x, chosen, **options: down(x, chosen, **options)
    split = without_bias(both), both.get("bias"), without_bias(down)
    layer._without_biases = lambda: split
    layer.has_shared = shared is not None
    layer.__class__ = StackedGLU


def _split_off(shared: Any, layer: Any, wholes: dict[str, Any], both: Any) -> None:
    """The last expert of each product is `shared`, which has two products of one input, too."""
    own = copy(shared.up_proj)
    for name, whole in wholes.items():
        for entry in STACKED:
            if whole.get(entry) is not None:
                # No number as an index: that would be a copy.
                layer[name][entry] = whole[entry][:-1]
                shared[name][entry] = whole[entry][-1:].squeeze(0)
                own[entry] = both[entry][-1:].squeeze(0)
        mx.eval(layer[name].parameters(), shared[name].parameters())
    mx.eval(own.parameters())
    share_product([shared.up_proj, shared.gate_proj], own)


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
