"""The noise of `backends/sampling/noise.py` in torch operations. Knows no seeds and no slots.

Words of 32 bits are int32 here: sums wrap as unsigned ones do, and shifts to the right are masked.
"""

from __future__ import annotations

import torch

from pippin.backends.sampling.noise import THREEFRY_PARITY, THREEFRY_ROTATIONS


def add_gumbel_noise(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [n, V], with the noise of the rows' keys, int32 [n, 2]."""
    return x - torch.log(exponential(random_bits(keys, x.shape[-1])))


def random_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [n, vocab_size]: the bits of unsigned numbers."""
    num_counters = (vocab_size + 1) // 2
    j = torch.arange(num_counters, dtype=torch.int32, device=keys.device)
    words = _threefry(keys[:, :1], keys[:, 1:], j, j + num_counters)
    return torch.cat(words, dim=-1)[:, :vocab_size]


def _threefry(
    key0: torch.Tensor, key1: torch.Tensor, counter0: torch.Tensor, counter1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    schedule = (key0, key1, key0 ^ key1 ^ THREEFRY_PARITY)
    x0, x1 = counter0 + key0, counter1 + key1
    for four_rounds in range(5):
        for rotation in THREEFRY_ROTATIONS[four_rounds % 2]:
            x0 = x0 + x1
            high = (x1 >> (32 - rotation)) & ((1 << rotation) - 1)
            x1 = ((x1 << rotation) | high) ^ x0
        x0 = x0 + schedule[(four_rounds + 1) % 3]
        x1 = x1 + schedule[(four_rounds + 2) % 3] + (four_rounds + 1)
    return x0, x1


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32, always positive and finite."""
    coarse = 1.0 - ((bits >> 9) & 0x7FFFFF).float() * 2.0**-23
    fine = (512 - (bits & 511)).float() * 2.0**-32
    return fine - torch.log(coarse)
