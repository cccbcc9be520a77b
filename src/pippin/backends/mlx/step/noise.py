"""The noise of `backends/sampling/noise.py` in MLX operations. Knows no seeds and no slots.

Every operation is a pass over the vocabulary for each row, and on a GPU a launch. Numbers are made
of their bits where that is one operation less than to convert, scale and shift them.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_ONE = 0x3F800000  # the bits of 1.0; the 23 below the exponent count in steps of 2^-23
_ALL_BUT_NINE = 0xFFFFFE00


def noise_words(streams: np.ndarray, numbers: mx.array) -> mx.array:
    """uint32 [n, 2]: `noise_keys` of streams, uint64 [n], and of tokens' numbers on the device."""
    return (mx.array(streams) + numbers.astype(mx.uint64))[:, None].view(mx.uint32)


def add_gumbel_noise(x: mx.array, keys: mx.array) -> mx.array:
    """Logits, float32 [n, V], with the noise of the rows' keys, uint32 [n, 2]."""
    return x - mx.log(exponential(random_bits(keys, x.shape[-1])))


def random_bits(keys: mx.array, vocab_size: int) -> mx.array:
    """uint32 [n, vocab_size].

    Subkeys are the bare words of mlx's generator, which Python can reach in no other way. Those of
    m subkeys are Threefry's first words of the counters (j, j + m), then its second ones.
    """
    num_subkeys = (vocab_size + 1) // 2
    subkeys = mx.vmap(lambda key: mx.random.split(key, num_subkeys))(keys)
    return subkeys.reshape(len(keys), -1)[:, :vocab_size]


def exponential(bits: mx.array) -> mx.array:
    """float32, always positive and finite."""
    coarse = 2 - ((bits >> 9) | _ONE).view(mx.float32)
    nine_bits_less_512 = (bits | _ALL_BUT_NINE).view(mx.int32)
    fine = nine_bits_less_512.astype(mx.float32) * -(2.0**-32)
    return fine - mx.log(coarse)
