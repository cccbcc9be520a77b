"""How much of a block of a prompt's chunk one program of attention takes, by device and model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from pippin.types import GRID

TILE_BYTES = 1 << 15  # of queries, and of the keys or values that are read at a time, at most
MUCH_SHARED = 200 << 10  # of shared memory: GPUs since Hopper take twice as much
PROGRAMS = 528  # of the first kernel, where blocks see much: four for each processor of a large GPU
MOST_SPLITS = 32  # of a block
LEAST_TOKENS = 1024  # of a stretch
HEADS_TOGETHER = 4  # of latent attention, whose heads share their keys


@dataclass(frozen=True)
class AttentionTile:
    num_tokens: int  # of a block
    num_keys: int
    num_warps: int
    num_heads: int = 1  # query heads of one program
    num_stages: int = 2


def attention_tile_for(
    dim: int, itemsize: int, heads_of_a_key: int = 1, shared_bytes: int = 0
) -> AttentionTile:
    """What fits into the shared memory of every GPU since Ampere, with two stages of keys; or into
    `shared_bytes`, where that is more."""
    if itemsize == 2 and shared_bytes >= MUCH_SHARED:
        together = 2 if heads_of_a_key % 2 == 0 else 1
        num_keys, num_stages = (GRID, 2) if dim <= 128 else (GRID // 2, 3)
        return AttentionTile(GRID, num_keys, 4 * together, together, num_stages)
    most, most_in_registers = TILE_BYTES // (dim * itemsize), 2 * GRID // itemsize
    num_tokens = max(16, min(most_in_registers, most))
    num_keys = max(16, min(most_in_registers, most // 2))
    return AttentionTile(num_tokens, num_keys, 8 if num_tokens * dim > 8192 else 4)


def latent_tile_for(heads: int, itemsize: int, shared_bytes: int = 0) -> AttentionTile:
    """The same, of cells of up to 576 channels that all heads share: a token of several heads is
    several rows of a program, which hold their sums in registers."""
    together = math.gcd(heads, HEADS_TOGETHER)
    if itemsize == 2 and shared_bytes >= MUCH_SHARED:
        return AttentionTile(GRID // together, GRID, 8, together, num_stages=3)
    num_keys, num_stages = (32, 2) if itemsize == 2 else (16, 1)
    return AttentionTile(16 // together, num_keys, 8, together, num_stages)


def splits_for(num_programs: int) -> int:
    """Stretches that a block can have at most: few blocks share a GPU by many."""
    most = max(1, min(MOST_SPLITS, PROGRAMS // num_programs))
    return 1 << (most.bit_length() - 1)


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Of a program, at most."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
