"""Sums of runs of memory by a kernel, which fingerprints are: on a GPU, or interpreted."""

from __future__ import annotations

import pytest

pytest.importorskip("interpreted")

import torch

from pippin.backends.torch.kernels.word_sums import BLOCK, sum_words

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("num_words", [1, 6, 64, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
def test_runs_add_up(num_words: int) -> None:
    """Words of all sizes: 32 bits would not hold their sums."""
    generator = torch.Generator().manual_seed(num_words)
    limits = torch.iinfo(torch.int32)
    memory = torch.randint(
        limits.min, limits.max, (7 * num_words,), dtype=torch.int32, generator=generator
    )
    memory[:num_words] = limits.max
    lines = torch.tensor([5, 0, 3, 5])
    found = sum_words(memory.to(DEVICE), (lines * num_words).to(DEVICE), num_words)
    assert found.dtype == torch.int64
    assert found.tolist() == memory.view(7, num_words)[lines].sum(dim=1).tolist()
