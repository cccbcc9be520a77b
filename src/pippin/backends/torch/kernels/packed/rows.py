"""Products of a few rows with packed weights, and whole weights unpacked for many rows.

few rows     tensor cores on tiles that are unpacked in registers; where a weight has few rows,
             several programs share them, each with a stretch of their words
many rows    the weight is unpacked in parts, for cuBLAS
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import (
    allow_next,
    dependent,
    wait_for_previous,
)
from pippin.backends.torch.kernels.packed.numbers import (
    arrays_of,
    constants_of,
    factor,
    number,
    packed_sums,
)
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.step.decode_inputs import Inputs

MOST_ROWS = 64  # more of them are worth a dense weight
PROGRAMS = 264  # two for each multiprocessor of an H200
MOST_SPLITS = 8
UNPACKED = 256  # words of a program


@dataclass(frozen=True)
class PackedTile:
    rows: int  # of x
    columns: int  # rows of the weight
    words: int  # that are read at a time
    num_warps: int
    num_stages: int


def packed_tile_for(num_rows: int) -> PackedTile:
    rows = max(16, min(64, triton.next_power_of_2(num_rows)))
    return PackedTile(rows, 32 if rows < 64 else 64, 32, 4, 3 if rows < 64 else 2)


def splits_for(num_programs: int, num_words: int, tile: PackedTile) -> int:
    """Programs that share a tile's words, so that the whole GPU reads."""
    wanted = min(PROGRAMS // max(num_programs, 1), num_words // (2 * tile.words), MOST_SPLITS)
    return max(wanted, 1)


@triton.jit
def _few_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    N,
    words_each,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    is_token, is_row = m < num_rows, n < N
    start = split * words_each
    end = tl.minimum(start + words_each, K // PER_WORD)
    sums = packed_sums(
        tl.zeros([ROWS, COLUMNS], tl.float32),
        x + m[:, None] * K,
        is_token,
        weight,
        n,
        is_row,
        start,
        end,
        K,
        KIND,
        GROUP,
        PER_WORD,
        OFFSET,
        WORDS,
        STAGES,
        PRECISION,
    )
    if BIAS:
        found = tl.load(bias + n, mask=is_row, other=0.0).to(tl.float32)
        sums += tl.where(split == 0, found, 0.0)[None, :]
    at = (split * num_rows + m[:, None]) * N + n[None, :]
    inside = is_token[:, None] & is_row[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=inside)


def few_rows(
    x: torch.Tensor,  # [rows, K]
    weight: Packed,
    bias: torch.Tensor | None,
    tile: PackedTile | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """[rows, N]"""
    (num_rows, size), num_out = x.shape, weight.shape[0]
    tile = tile or packed_tile_for(num_rows)
    x = x.contiguous()
    grid = triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows)
    num_words = weight.words.shape[-1]
    splits = splits or splits_for(grid[0] * grid[1], num_words, tile)
    words_each = triton.cdiv(triton.cdiv(num_words, splits), tile.words) * tile.words
    kept = x.dtype if splits == 1 else torch.float32
    out = torch.empty(splits, num_rows, num_out, dtype=kept, device=x.device)
    _few_rows[(*grid, splits)](
        x,
        arrays_of(weight),
        bias,
        out,
        num_rows,
        num_out,
        words_each,
        K=size,
        **constants_of(weight),
        BIAS=bias is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        WORDS=tile.words,
        STAGES=tile.num_stages,
        PRECISION=precision_of(x.dtype),
        num_warps=tile.num_warps,
        **dependent(x.device),
    )
    return out[0] if splits == 1 else out.sum(dim=0).to(x.dtype)


@triton.jit
def _unpack_words(
    weight,
    row,
    out,  # of that row
    w,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
):
    per_group: tl.constexpr = GROUP // PER_WORD
    inside = w < K // PER_WORD
    words = tl.load(weight.words + row * (K // PER_WORD) + w, mask=inside, other=0)
    at = row * (K // GROUP) + w // per_group
    scale = factor(weight.scales, at, inside)
    if OFFSET:
        offset = tl.load(weight.offsets + at, mask=inside, other=0.0).to(tl.float32)
    channel = (w // per_group) * GROUP + w % per_group
    for part in tl.static_range(PER_WORD):
        found = number(words, part, KIND) * scale
        if OFFSET:
            found += offset
        tl.store(out + channel + part * per_group, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(
    weight,
    out,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    _unpack_words(weight, row, out + row * K, w, K, KIND, GROUP, PER_WORD, OFFSET)


@triton.jit
def _look_up(
    weight,
    future,
    table,
    slots,
    positions,
    cells,
    out,
    stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)  # and only then allow the next one: this is a step's first kernel
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(future + slot).to(tl.int64)
    _unpack_words(weight, token, out + row * K, w, K, KIND, GROUP, PER_WORD, OFFSET)
    tl.store(table + slot * stride + tl.load(positions + row), tl.load(cells + row))


def _grid(num_rows: int, num_words: int) -> tuple[tuple[int, int], dict[str, int]]:
    """And the constants that it is for."""
    block = min(UNPACKED, triton.next_power_of_2(num_words))
    constants = {"WORDS": block, "num_warps": max(1, min(4, block // 32))}
    return (num_rows, triton.cdiv(num_words, block)), constants


def dense_rows(weight: Packed) -> torch.Tensor:
    """As `models/packed.py: dense`."""
    num_rows, size = weight.shape
    out = torch.empty(num_rows, size, dtype=weight.dtype, device=weight.device)
    grid, block = _grid(num_rows, weight.words.shape[-1])
    _unpack[grid](arrays_of(weight), out, K=size, **constants_of(weight), **block)
    return out


def look_up_packed(
    embed: Packed,
    future: torch.Tensor,  # int32 [slots]: the future map
    table: torch.Tensor,  # int32 [slots, positions]
    inputs: Inputs,
) -> torch.Tensor:
    """As `kernels/rows.py: look_up`."""
    rows, size = (inputs.slot, inputs.position, inputs.cell), embed.shape[1]
    out = torch.empty(len(rows[0]), size, dtype=embed.dtype, device=embed.device)
    grid, block = _grid(len(rows[0]), embed.words.shape[-1])
    _look_up[grid](
        arrays_of(embed),
        future,
        table,
        *rows,
        out,
        table.stride(0),
        K=size,
        **constants_of(embed),
        **block,
        **dependent(out.device),
    )
    return out
