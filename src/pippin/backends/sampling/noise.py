"""The noise that sampling draws, specified to the bit, so that a seed means the same everywhere.

Knows no logits, no model and no array library but numpy. Backends derive their keys here
(`stream_of`, `noise_keys`) and compute the rest in operations of their own; `random_bits`,
`exponential` and `gumbel` are the reference that their tests compare with.

A row draws argmax(x[i] + g[i]) over its scaled logits x (Gumbel-max). The noise g is a function of
the request's seed, of the token's index in the reply, from 0, and of the vocabulary's size V:

1.  stream = mix64((seed + 0x9E3779B97F4A7C15) mod 2^64), mix64 the finaliser of splitmix64. It is
    a bijection that scatters: neighbouring seeds get streams far apart.
2.  key = (stream + index) mod 2^64, as two words of 32 bits: the low one, then the high one.
3.  With n = ceil(V / 2) and j = i mod n, Threefry-2x32 of 20 rounds, under that key, makes two
    words of the counter (j, j + n). bits[i] is the first of them if i < n, else the second.
4.  In float32, where everything but the logarithm and the last subtraction is exact:

        coarse = 1 - (bits >> 9) * 2^-23          23 bits, in [2^-23, 1]
        fine   = (512 - (bits & 511)) * 2^-32      9 bits, in [2^-32, 2^-23]
        E      = fine - log(coarse)                exponentially distributed

5.  g[i] = -log(E).

E stands for -log(1 - v) with v = 1 - coarse + fine, all 32 bits. A token of probability p is drawn
when its E is about p or less. -log(u) of a float32 u near 1 has steps of 2^-24, which would draw a
token of 2e-8 a quarter as often as it should and one of 5e-9 never; a vocabulary of 250,000 may
well have half a percent of its mass in such tokens.

Logarithms may differ by a few units in the last place between backends, nothing else may.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
THREEFRY_PARITY = 0x1BD11BDA
THREEFRY_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def stream_of(seed: int) -> int:
    """The uint64 from which a request's keys count; seeds equal modulo 2^64 are the same."""
    z = (seed + _GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def noise_keys(
    streams: np.ndarray,  # uint64 [n]
    indices: Sequence[int],  # of the rows' tokens in their replies
) -> np.ndarray:
    """uint32 [n, 2]: the key of each row."""
    keys = streams + np.array(indices, dtype=np.int64).astype(np.uint64)  # wraps
    return keys.astype("<u8", copy=False).view("<u4").reshape(-1, 2)


def random_bits(keys: np.ndarray, vocab_size: int) -> np.ndarray:
    """uint32 [n, vocab_size] under keys, uint32 [n, 2]."""
    num_counters = (vocab_size + 1) // 2
    j = np.arange(num_counters, dtype=np.uint32)
    words = threefry(keys[:, :1], keys[:, 1:], j, j + np.uint32(num_counters))
    return np.concatenate(words, axis=-1)[:, :vocab_size]


A = TypeVar("A", bound=Any)


def _rotated(words: np.ndarray, by: int) -> np.ndarray:
    found: np.ndarray = (words << np.uint32(by)) | (words >> np.uint32(32 - by))
    return found


def threefry(
    key0: A, key1: A, counter0: A, counter1: A, rotated: Callable[[Any, int], Any] = _rotated
) -> tuple[A, A]:
    """Threefry-2x32-20 (Salmon et al., 2011) of uint32 arrays that broadcast together.

    `rotated`: words of them to the left by so many bits, in any library of arrays.
    """
    schedule = (key0, key1, key0 ^ key1 ^ THREEFRY_PARITY)
    x0, x1 = counter0 + key0, counter1 + key1
    for four_rounds in range(5):
        for rotation in THREEFRY_ROTATIONS[four_rounds % 2]:
            x0 = x0 + x1
            x1 = rotated(x1, rotation) ^ x0
        x0 = x0 + schedule[(four_rounds + 1) % 3]
        x1 = x1 + schedule[(four_rounds + 2) % 3] + (four_rounds + 1)
    return x0, x1


def exponential(bits: np.ndarray) -> np.ndarray:
    """float32, always positive and finite."""
    coarse = np.float32(1) - (bits >> np.uint32(9)).astype(np.float32) * np.float32(2**-23)
    fine = (np.uint32(512) - (bits & np.uint32(511))).astype(np.float32) * np.float32(2**-32)
    found: np.ndarray = fine - _log(coarse)
    return found


def gumbel(bits: np.ndarray) -> np.ndarray:
    """float32: what is added to the logits."""
    return -_log(exponential(bits))


def _log(x: np.ndarray) -> np.ndarray:
    """Rounded once: numpy's own float32 logarithm depends on the CPU."""
    return np.log(x.astype(np.float64)).astype(np.float32)
