"""Families that mlx-lm loads and that are not served, and why. Knows their names alone.

What a layout or a trial run finds out at load needs no line here. These would pass, or fail in
words that say nothing to a user. A reason ends the sentence "… models are not served: ".
"""

from __future__ import annotations

from pippin.errors import UnsupportedLayout

_INDEXED = "an indexer picks the tokens that a layer reads by their place in the cache, which rows \
of different lengths do not share"
_BORROWED = "some of its layers read, out of the cache itself, KV that other layers keep"
_CHUNKED = "its layers attend within chunks of the sequence and forget the chunks before"

REASONS = {
    "afm7": _BORROWED,
    "deepseek_v32": _INDEXED,
    "deepseek_v41": "its layers keep compressed caches of a kind of their own",
    "gemma2": "its attention lays the mask of a batch over heads, not over rows",
    "gemma3n": _BORROWED,
    "glm_moe_dsa": _INDEXED,
    "llama4": _CHUNKED,
    "llama4_text": _CHUNKED,
    "minimax_m3_vl": _INDEXED,
}


def check(model_type: str) -> None:
    """Refuse a family by name, before its weights are read."""
    if model_type in REASONS:
        raise refusal(model_type, REASONS[model_type])


def refusal(model_type: str, reason: str) -> UnsupportedLayout:
    return UnsupportedLayout(f"{model_type} models are not served: {reason}")
