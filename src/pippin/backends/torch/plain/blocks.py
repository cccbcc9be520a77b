"""Packed rows cut into blocks of 64 tokens, as recurrences run them. Knows no recurrence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.types import GRID


class Blocks:
    """Where the blocks of packed rows lie. Rows of any lengths, each in blocks from its start."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        num_tokens = sum(lengths)
        self.counts = [-(-length // GRID) for length in lengths]
        self.firsts = np.cumsum([0, *self.counts])[:-1].tolist()
        starts = np.cumsum([0, *lengths])[:-1]
        index = np.full((sum(self.counts), GRID), num_tokens, dtype=np.int64)  # padding
        places = np.zeros(num_tokens, dtype=np.int64)
        for start, length, first in zip(starts.tolist(), lengths, self.firsts, strict=True):
            tokens = np.arange(start, start + length)
            index.reshape(-1)[first * GRID : first * GRID + length] = tokens
            places[tokens] = first * GRID + np.arange(length)
        self._index = torch.from_numpy(index).to(device)
        self._places = torch.from_numpy(places).to(device)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] to [blocks, heads, 64, ...], zeros behind a row's end."""
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self._index].transpose(1, 2)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1)[self._places]


def decays_between(decays: torch.Tensor) -> torch.Tensor:
    """Of sums of gates' logarithms from a block's start [.., 64]: at (t, s <= t) the product of the
    gates s+1..t, else 0."""
    size = decays.shape[-1]
    ones = torch.ones(size, size, dtype=torch.bool, device=decays.device)
    between = decays[..., :, None] - decays[..., None, :]
    return between.masked_fill(~ones.tril(), -torch.inf).exp()
