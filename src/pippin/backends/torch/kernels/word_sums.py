"""Sums of many runs of memory in one launch, for fingerprints. Integers: the order is nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words of a program; a longer run takes several


@triton.jit
def _sum_words(memory, starts, sums, num_words, BLOCK: tl.constexpr):
    run = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + run)
    words = tl.load(memory + start + at, mask=at < num_words, other=0)
    tl.atomic_add(sums + run, tl.sum(words.to(tl.int64)))


def sum_words(memory: torch.Tensor, starts: torch.Tensor, num_words: int) -> torch.Tensor:
    """Of int32 `memory`, `num_words` from each of `starts` (int64) on: int64, one for each."""
    sums = torch.zeros(len(starts), dtype=torch.int64, device=memory.device)
    grid = (len(starts), triton.cdiv(num_words, BLOCK))
    _sum_words[grid](memory, starts, sums, num_words, BLOCK=BLOCK, num_warps=4)
    return sums
