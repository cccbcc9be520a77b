"""Rotary positions as a config.json describes them."""

from __future__ import annotations

from typing import Any

from pippin.backends.torch.shapes import RopeShape
from pippin.errors import UnsupportedLayout

Json = dict[str, Any]
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(
    text: Json, head_dim: int, max_len: int, *, share: float = 1.0, theta: float = 10000.0
) -> RopeShape:
    """`share` of a head's channels and `theta`: where the config does not say."""
    options: Json = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = str(options.get("rope_type") or options.get("type") or "default")
    if kind == "mrope":  # of text, whose three positions are one
        kind = "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedLayout(f"rope of type {kind} is not served by torch")
    share = options.get("partial_rotary_factor") or text.get("partial_rotary_factor") or share
    theta = options.get("rope_theta") or text.get("rope_theta") or theta
    return RopeShape(int(head_dim * float(share)), float(theta), kind, options, max_len)
