"""Which weights of a checkpoint are its MTP head, and how they are stored.

The head of Qwen3.5 and Qwen3-Next drafts the token behind the next one:

    x = fc(concatenate(norm of the next token's embedding, norm of the hidden vector before it))
    hidden vector of the next token = norm(layer(x));  logits = the model's own head of that

The hidden vector is what the model's own head reads: after its final norm. `layer` is one layer of
the model with full attention, at the positions of the tokens before the next ones. The next draft
takes the head's own hidden vector. Embedding and head are the model's. Every norm of it is stored
less one, as those of the model are (`STORED_LESS_ONE`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFIX = "mtp."
LAYER = "layers.0."  # within the prefix: the one layer
FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
STORED_LESS_ONE = re.compile(r"norm(_embedding|_hidden)?\.weight$")

_NORMS = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
_LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj")
_REQUIRED = frozenset(
    f"{name}.weight"
    for name in (
        *("fc", *_NORMS),
        *(f"{LAYER}{name}" for name in _LAYER_NORMS),
        *(f"{LAYER}self_attn.{name}" for name in _ATTENTION),
    )
)
_FEED_FORWARD = re.compile(
    re.escape(f"{LAYER}mlp.")
    + r"((gate|up|down)_proj\.weight"
    + r"|(gate|shared_expert_gate)\.weight|shared_expert\.(gate|up|down)_proj\.weight"
    + r"|experts\.(\d{1,4}\.(gate|up|down)_proj\.weight|gate_up_proj|down_proj))$"
)


def find_mtp_weights(model_type: str, stored: Iterable[str]) -> frozenset[str] | str:
    """Names without the prefix, of the head that a checkpoint with these names has; or why it has
    none that could be run."""
    found = frozenset(name[len(PREFIX) :] for name in stored if name.startswith(PREFIX))
    if not found:
        return "the checkpoint has no MTP head"
    if model_type not in FAMILIES:
        return f"MTP heads of {model_type} models are not known"
    missing = sorted(_REQUIRED - found)
    if missing:
        return f"its MTP head lacks {PREFIX}{missing[0]}"
    rest = found - _REQUIRED
    unknown = sorted(name for name in rest if not _FEED_FORWARD.match(name))
    if unknown:
        return f"its MTP head has a weight that is not known: {PREFIX}{unknown[0]}"
    mlp = f"{LAYER}mlp."
    if rest != {f"{mlp}{name}.weight" for name in _MLP} and f"{mlp}gate.weight" not in rest:
        return "its MTP head has no whole feed-forward layer"
    return found
