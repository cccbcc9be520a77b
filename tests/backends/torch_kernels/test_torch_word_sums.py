"""Sums of runs of memory by a kernel, which fingerprints are: on a GPU, or interpreted."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.torch.kernels.word_sums import BLOCK, sum_words

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_words", [1, 6, 64, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_runs_add_up(num_words: int) -> None:
    """Words of all sizes: 32 bits would not hold their sums. Runs of several lengths."""
    generator = torch.Generator().manual_seed(num_words)
    limits = torch.iinfo(torch.int32)
    memory = torch.randint(
        limits.min, limits.max, (7 * num_words,), dtype=torch.int32, generator=generator
    )
    memory[:num_words] = limits.max
    on_device = memory.to(DEVICE)
    runs = [(5, num_words), (0, num_words), (3, 2 * num_words), (5, num_words), (6, 1)]
    addresses = [on_device.data_ptr() + 4 * line * num_words for line, _ in runs]
    lengths = [length for _, length in runs]
    found = sum_words(torch.tensor([addresses, lengths], device=DEVICE))
    assert found.dtype == torch.int64
    starts = [line * num_words for line, _ in runs]
    expected = [int(memory[a : a + n].sum()) for a, n in zip(starts, lengths, strict=True)]
    assert found.tolist() == expected
