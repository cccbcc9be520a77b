"""Packed masks of tokens: what a grammar allows next, 32 tokens a word.

    word  i // 32 of a row, bit  i % 32, the lowest first:  1 where token i may come next

A vocabulary of 248,320 tokens takes 31 kB a row, an eighth of an array of booleans.
"""

from __future__ import annotations

import numpy as np

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def full_masks(num_rows: int, vocab_size: int) -> np.ndarray:
    """int32 [num_rows, num_words]: every token may come. Bits past the vocabulary mean nothing."""
    return np.full((num_rows, num_words(vocab_size)), -1, dtype=np.int32)


def allow_only(mask: np.ndarray, token: int) -> None:
    """Change a row, int32 [num_words], such that nothing but `token` may come."""
    mask[:] = 0
    mask.view(np.uint32)[token // WORD_BITS] = 1 << (token % WORD_BITS)


def pack(allowed: np.ndarray) -> np.ndarray:
    """Of bool [vocab_size], the row, int32 [num_words]."""
    padded = np.zeros(num_words(len(allowed)) * WORD_BITS, dtype=np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32)


def allowed_ids(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """The tokens, ascending, that a row allows."""
    row = mask.astype("<i4").view(np.uint8)
    return np.flatnonzero(np.unpackbits(row, bitorder="little")[:vocab_size])
