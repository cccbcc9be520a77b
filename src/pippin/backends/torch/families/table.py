"""How the served families differ from Llama, a few lines each. Reads no config and no weights.

`options` are the keys of config.json that a family's own code reads and others' does not, with what
it takes them to be where a config does not say. A key of another family is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from pippin.backends.torch.shapes import NormNames, QkNorm, Scoring

Json = dict[str, Any]

LLAMA_NORMS = NormNames()
POST_NORMS = NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm")
GEMMA_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GLM4_NORMS = NormNames(
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
ONE_NORM = NormNames("input_layernorm", "", "", "")


@dataclass(frozen=True)
class Family:
    options: Json = field(default_factory=dict)
    out_bias: bool = True  # `attention_bias` is about the last product, too
    qk_norm: QkNorm | None = None
    norms: NormNames = LLAMA_NORMS
    norm_offset: float = 0.0
    centred: bool = False  # norms subtract the mean
    # Where a config has no layer_types: every so many layers one sees everything, others have a
    # window; 1: all see everything; 0: none does.
    full_every: int = 1
    rope_share: float = 1.0  # of a head's channels, where a config does not say
    rope_pairs: bool = False  # a channel turns with its neighbour, not with one half a head away
    is_hybrid: bool = False  # Gated DeltaNet, and attention with gates
    scaled_embeddings: bool = False  # by the root of their size
    parallel: bool = False  # a layer's feed-forward part reads what its attention reads
    sinks: bool = False
    scales_rope_of_full: bool = False  # rope_scaling is not about layers with windows
    experts: Scoring | None = None
    expert_bias: bool = False  # of experts and of their router


_BIASES = {"attention_bias": False, "mlp_bias": False}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_HYBRID = Family(
    {"attention_bias": False},
    is_hybrid=True,
    qk_norm="head",
    norm_offset=1.0,
    rope_share=0.25,
    full_every=4,
)
_HYBRID_MOE = replace(_HYBRID, experts="softmax")
_GLM = Family({"attention_bias": True}, out_bias=False, rope_share=0.5, rope_pairs=True)
_GEMMA2 = Family(
    {
        "attention_bias": False,
        "tie_word_embeddings": True,
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    norms=GEMMA_NORMS,
    norm_offset=1.0,
    full_every=2,
    scaled_embeddings=True,
)
_COHERE = Family(
    {
        "attention_bias": False,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "use_qk_norm": False,
    },
    norms=ONE_NORM,
    qk_norm="head",
    centred=True,
    rope_pairs=True,
    parallel=True,
)

FAMILY = {
    "llama": Family({**_BIASES, "sliding_window": None}),
    "mistral": Family({"sliding_window": 4096}, full_every=0),
    "mixtral": Family({"sliding_window": None}, full_every=0, experts="softmax"),
    "qwen2": Family({"qkv_bias": True, **_QWEN_WINDOWS}),
    "qwen2_moe": Family({"qkv_bias": True, "norm_topk_prob": False}, experts="softmax"),
    "qwen3": Family({"attention_bias": False, **_QWEN_WINDOWS}, qk_norm="head"),
    "qwen3_moe": Family(
        {"attention_bias": False, "norm_topk_prob": False}, qk_norm="head", experts="softmax"
    ),
    "qwen3_next": replace(_HYBRID_MOE, options=_HYBRID.options | {"norm_topk_prob": True}),
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe": _HYBRID_MOE,
    "qwen3_5_moe_text": _HYBRID_MOE,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        options=_GEMMA2.options
        | {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
        qk_norm="head",
        scales_rope_of_full=True,
    ),
    "gpt_oss": Family(
        {
            "attention_bias": True,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
            "rope_theta": 150_000.0,
        },
        full_every=2,
        sinks=True,
        experts="softmax",
        expert_bias=True,
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=GLM4_NORMS),
    "glm4_moe": Family(
        {"attention_bias": False, "use_qk_norm": False, "norm_topk_prob": True},
        out_bias=False,
        rope_share=0.5,
        qk_norm="head",
        experts="sigmoid",
    ),
    "granite": Family(
        {
            **_BIASES,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
    ),
    "smollm3": Family(
        {
            **_BIASES,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
        }
    ),
    "olmo2": Family({"attention_bias": False}, norms=POST_NORMS, qk_norm="all"),
    "olmo3": Family(
        {"attention_bias": False, "sliding_window": 4096},
        norms=POST_NORMS,
        qk_norm="all",
        full_every=4,
        scales_rope_of_full=True,
    ),
    "phi3": Family({"sliding_window": None}, full_every=0),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        options=_COHERE.options | {"sliding_window": 4096, "sliding_window_pattern": 4},
        full_every=4,
        qk_norm=None,
    ),
}
_READ_BY_SOME = {key for family in FAMILY.values() for key in family.options}
_READ_BY_ALL = {"tie_word_embeddings", "hidden_act", "head_dim", "rope_theta"}


def read_options(text: Json, family: Family) -> Json:
    """A config as the family's own code reads it."""
    foreign = _READ_BY_SOME - _READ_BY_ALL - family.options.keys()
    return family.options | {key: value for key, value in text.items() if key not in foreign}
