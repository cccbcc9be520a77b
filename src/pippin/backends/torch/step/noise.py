"""The noise of `backends/sampling/noise.py` in torch operations. Knows no seeds and no slots.

Words of 32 bits are int32 here: sums wrap as unsigned ones do, and shifts to the right are masked.
"""

from __future__ import annotations

import torch

from pippin.backends.sampling.noise import threefry


def add_gumbel_noise(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Logits, float32 [n, V], with the noise of the rows' keys, int32 [n, 2]."""
    return x - torch.log(exponential(random_bits(keys, x.shape[-1])))


def random_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 [n, vocab_size]: the bits of unsigned numbers."""
    num_counters = (vocab_size + 1) // 2
    j = torch.arange(num_counters, dtype=torch.int32, device=keys.device)
    words = threefry(keys[:, :1], keys[:, 1:], j, j + num_counters, _rotated)
    return torch.cat(words, dim=-1)[:, :vocab_size]


def _rotated(words: torch.Tensor, by: int) -> torch.Tensor:
    high = (words >> (32 - by)) & ((1 << by) - 1)
    return (words << by) | high


def exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32, always positive and finite."""
    coarse = 1.0 - ((bits >> 9) & 0x7FFFFF).float() * 2.0**-23
    fine = (512 - (bits & 511)).float() * 2.0**-32
    return fine - torch.log(coarse)
