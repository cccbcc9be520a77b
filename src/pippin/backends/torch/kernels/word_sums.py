"""Sums of many runs of words in one launch, for fingerprints, in place of their addresses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # words at a time


@triton.jit
def _sum_words(runs, BLOCK: tl.constexpr):
    run = runs + tl.program_id(0)
    words = tl.load(run).to(tl.pointer_type(tl.int32))
    num_words = tl.load(run + tl.num_programs(0))
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for first in range(0, num_words, BLOCK):
        at = first + tl.arange(0, BLOCK)
        sums += tl.load(words + at, mask=at < num_words, other=0).to(tl.int64)
    tl.store(run, tl.sum(sums))


def sum_words(runs: torch.Tensor) -> torch.Tensor:
    """runs, int64 [2, runs]: addresses of int32 words, and how many. Returns int64 [runs]."""
    _sum_words[runs.shape[1:]](runs, BLOCK=BLOCK, num_warps=4)
    return runs[0]
