"""Families that mlx-lm loads and that are not served, and why. Knows their names alone.

What a layout or a trial run finds out at load needs no line here. These would pass, or fail in
words that say nothing to a user. A reason ends the sentence "… models are not served: ".
"""

from __future__ import annotations

from pippin.errors import UnsupportedLayout

REASONS = {
    "deepseek_v41": "its layers keep compressed caches of a kind of their own",
    "gpt_bigcode": "mlx-lm's code has one position for all rows of a batch",
    "longcat_flash_ngram": "its state grows with its first tokens, and states here have one size",
    "olmo": "mlx-lm needs the package ai2-olmo for them; OLMo 2 and later are served",
    "phi3small": "mlx-lm adds its mask to the scores as numbers, so that tokens see later ones",
}


def check(model_type: str) -> None:
    """Refuse a family by name, before its weights are read."""
    if model_type in REASONS:
        raise refusal(model_type, REASONS[model_type])


def refusal(model_type: str, reason: str) -> UnsupportedLayout:
    return UnsupportedLayout(f"{model_type} models are not served: {reason}")
