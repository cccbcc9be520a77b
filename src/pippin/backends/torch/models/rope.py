"""Rotary positions: one table of cosines and sines for all positions a model may see."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from pippin.backends.torch.shapes import RopeShape


@dataclass(frozen=True)
class Rope:
    cos: torch.Tensor  # float32 [max_len, dim / 2]
    sin: torch.Tensor

    @classmethod
    def of(cls, shape: RopeShape, max_len: int, device: torch.device) -> Rope:
        frequencies, scale = inverse_frequencies(shape)
        angles = torch.arange(max_len, dtype=torch.float32)[:, None] * frequencies
        return cls((angles.cos() * scale).to(device), (angles.sin() * scale).to(device))

    @property
    def dim(self) -> int:
        return 2 * int(self.cos.shape[-1])

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, head_dim]: the first `dim` channels of each head, in two halves."""
        if not self.dim:
            return x
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        first, second, rest = x.split(
            [self.dim // 2, self.dim // 2, x.shape[-1] - self.dim], dim=-1
        )
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def inverse_frequencies(shape: RopeShape) -> tuple[torch.Tensor, float]:
    """float32 [dim / 2], and what cosines and sines are multiplied with."""
    exponents = torch.arange(0, shape.dim, 2, dtype=torch.float32) / shape.dim
    plain = 1.0 / shape.theta**exponents
    options = shape.options
    match shape.kind:
        case "linear":
            return plain / float(options["factor"]), 1.0
        case "llama3":
            return _llama3(plain, options), 1.0
        case "yarn":
            return _yarn(plain, shape)
    return plain, 1.0


def _llama3(plain: torch.Tensor, options: dict[str, float]) -> torch.Tensor:
    """Long waves are stretched, short ones are not, those between in proportion."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - smooth) * plain / options["factor"] + smooth * plain


def _yarn(plain: torch.Tensor, shape: RopeShape) -> tuple[torch.Tensor, float]:
    options = shape.options
    trained = options["original_max_position_embeddings"]
    factor = float(options.get("factor") or shape.max_len / trained)

    def dim_of(rotations: float) -> float:
        turns = trained / (rotations * 2 * math.pi)
        return shape.dim * math.log(turns) / (2 * math.log(shape.theta))

    low = dim_of(options.get("beta_fast") or 32)
    high = dim_of(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.dim - 1)
    span = max(high - low, 0.001)
    stretched = ((torch.arange(shape.dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    frequencies = plain / factor * stretched + plain * (1.0 - stretched)
    return frequencies, float(options.get("attention_factor") or _yarn_scale(factor, options))


def _yarn_scale(factor: float, options: dict[str, float]) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return scale(options["mscale"]) / scale(options["mscale_all_dim"])
    return scale(1.0)
