"""A checkpoint's config.json as the numbers that our decoder needs. Reads no weights.

Families differ in a few switches; what none of these says is refused here, by name, before any
weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pippin.errors import LoadError, UnsupportedLayout

LayerKind = Literal["attention", "window", "delta"]
Json = dict[str, Any]

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
)
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeShape:
    dim: int  # of a head's channels, how many are rotated: the first ones
    theta: float
    kind: str = "default"
    options: Json = field(default_factory=dict)  # of the kind
    max_len: int = 0


@dataclass(frozen=True)
class DeltaShape:
    """A Gated DeltaNet layer."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_taps: int  # of the convolution
    interleaved: bool  # its projections are stored head by head (qwen3_next)

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys, values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    num_chosen: int
    intermediate: int
    normalised: bool  # the chosen ones' weights add up to 1
    shared_intermediate: int = 0  # of the expert that every token goes to; 0: there is none
    layers: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ModelShape:
    model_type: str
    prefix: str  # of the weights' names
    vocab_size: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_len: int
    tied: bool
    rope: RopeShape
    layers: tuple[LayerKind, ...]
    window: int = 0  # tokens that layers with one see, the newest included
    qk_norm: bool = False
    qkv_bias: bool = False  # which products have a bias
    out_bias: bool = False
    mlp_bias: bool = False
    norm_offset: float = 0.0  # a norm's weight is stored less this
    gated_attention: bool = False
    delta: DeltaShape | None = None
    experts: ExpertShape | None = None


def read_config(path: Path) -> Json:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"{path.name}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise LoadError(f"{path.name}: config.json is not an object")
    return config


def read_shape(config: Json) -> ModelShape:
    model_type = str(config.get("model_type"))
    if model_type not in FAMILIES:
        raise UnsupportedLayout(
            f"{model_type} models are not served by the torch backend: it has {', '.join(FAMILIES)}"
        )
    if "quantization_config" in config or "quantization" in config:
        raise LoadError(f"quantized {model_type} checkpoints are not served by the torch backend")
    try:
        return _shape(config, model_type)
    except KeyError as error:
        raise LoadError(f"config.json of this {model_type} lacks {error}") from error


def _shape(config: Json, model_type: str) -> ModelShape:
    text: Json = config.get("text_config") or config
    family = model_type.removesuffix("_text")
    is_hybrid = family in ("qwen3_next", "qwen3_5", "qwen3_5_moe")
    _refuse(text, model_type)
    window = _window(text, family)
    num_heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or text["hidden_size"] // num_heads)
    max_len = int(text.get("max_position_embeddings") or 4096)
    # Mistral's and Qwen2's own code reads no such switch.
    has_attention_bias = family not in ("mistral", "qwen2") and bool(text.get("attention_bias"))
    return ModelShape(
        model_type=model_type,
        prefix="model.language_model." if "text_config" in config else "model.",
        vocab_size=int(text["vocab_size"]),
        hidden=int(text["hidden_size"]),
        intermediate=int(text.get("intermediate_size") or 0),
        num_heads=num_heads,
        num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        eps=float(text["rms_norm_eps"]),
        max_len=max_len,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        rope=_rope(text, head_dim, max_len, 0.25 if is_hybrid else 1.0),
        layers=_layers(text, window, is_hybrid=is_hybrid),
        window=window or 0,
        qk_norm=family.startswith("qwen3"),
        qkv_bias=family == "qwen2" or has_attention_bias,
        out_bias=has_attention_bias,
        mlp_bias=family == "llama" and bool(text.get("mlp_bias")),
        norm_offset=1.0 if is_hybrid else 0.0,
        gated_attention=is_hybrid,
        delta=_delta(text, interleaved=family == "qwen3_next") if is_hybrid else None,
        experts=_experts(text, family),
    )


def suit_kernels(shape: ModelShape) -> bool:
    """Whether our kernels take it: heads of powers of two, 16 at least, and no windows."""
    if "window" in shape.layers:
        return False
    sizes = [shape.head_dim]
    if shape.delta is not None:
        sizes += [shape.delta.k_dim, shape.delta.v_dim]
    return all(size >= 16 and size & (size - 1) == 0 for size in sizes)


def _refuse(text: Json, model_type: str) -> None:
    if text.get("use_sliding_window") and model_type not in ("qwen2", "qwen3"):
        raise UnsupportedLayout(f"{model_type} with sliding windows is not served by torch")
    if text.get("hidden_act", "silu") != "silu":
        raise UnsupportedLayout(f"{model_type} with {text['hidden_act']} is not served by torch")


def _rope(text: Json, head_dim: int, max_len: int, share: float) -> RopeShape:
    options: Json = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = str(options.get("rope_type") or options.get("type") or "default")
    if kind == "mrope":  # of text, whose three positions are one
        kind = "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedLayout(f"rope of type {kind} is not served by torch")
    share = options.get("partial_rotary_factor") or text.get("partial_rotary_factor") or share
    theta = options.get("rope_theta") or text.get("rope_theta") or 10000.0
    return RopeShape(int(head_dim * float(share)), float(theta), kind, options, max_len)


def _window(text: Json, family: str) -> int | None:
    """Tokens that layers of type `sliding_attention` see."""
    if family == "mistral":  # whose configs may omit it
        return int(text.get("sliding_window", 4096) or 0) or None
    if family in ("qwen2", "qwen3") and not text.get("use_sliding_window"):
        return None
    return int(text.get("sliding_window") or 0) or None


def _layers(text: Json, window: int | None, *, is_hybrid: bool) -> tuple[LayerKind, ...]:
    num_layers = int(text["num_hidden_layers"])
    names = text.get("layer_types") or _layer_types(text, window, is_hybrid, num_layers)
    kinds: dict[str, LayerKind] = {"linear_attention": "delta", "full_attention": "attention"}
    if window is not None and not is_hybrid:
        kinds["sliding_attention"] = "window"
    if unknown := set(names) - set(kinds):
        raise UnsupportedLayout(f"layers of type {min(unknown)} are not served by torch")
    return tuple(kinds[name] for name in names)


def _layer_types(text: Json, window: int | None, is_hybrid: bool, num_layers: int) -> list[str]:
    """As the families' own code has it, where a config does not say."""
    if is_hybrid:
        every = int(text.get("full_attention_interval") or 4)
        is_full = [(index + 1) % every == 0 for index in range(num_layers)]
        return ["full_attention" if full else "linear_attention" for full in is_full]
    match str(text["model_type"]):
        case "mistral" if window is not None:
            num_full = 0
        case "qwen2" | "qwen3" if window is not None:
            num_full = int(text.get("max_window_layers", 28))
        case _:
            num_full = num_layers
    is_full = [index < num_full for index in range(num_layers)]
    return ["full_attention" if full else "sliding_attention" for full in is_full]


def _delta(text: Json, *, interleaved: bool) -> DeltaShape:
    return DeltaShape(
        num_k_heads=int(text["linear_num_key_heads"]),
        num_v_heads=int(text["linear_num_value_heads"]),
        k_dim=int(text["linear_key_head_dim"]),
        v_dim=int(text["linear_value_head_dim"]),
        num_taps=int(text["linear_conv_kernel_dim"]),
        interleaved=interleaved,
    )


def _experts(text: Json, family: str) -> ExpertShape | None:
    if family not in ("qwen3_moe", "qwen3_next", "qwen3_5_moe"):
        return None
    every = int(text.get("decoder_sparse_step") or 1)
    dense = set(text.get("mlp_only_layers") or ())
    chosen = (i for i in range(int(text["num_hidden_layers"])) if (i + 1) % every == 0)
    return ExpertShape(
        num_experts=int(text["num_experts"]),
        num_chosen=int(text["num_experts_per_tok"]),
        intermediate=int(text["moe_intermediate_size"]),
        normalised=family == "qwen3_5_moe"
        or bool(text.get("norm_topk_prob", family == "qwen3_next")),
        shared_intermediate=int(text.get("shared_expert_intermediate_size") or 0),
        layers=frozenset(i for i in chosen if i not in dense),
    )
