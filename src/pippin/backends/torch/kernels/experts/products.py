"""Products of tokens with their experts' weights, and the sum over the experts of each token.

    y[p] = down[e] (silu(gate[e] x[t]) * up[e] x[t])      of each pair p, a token t and an expert e
    out[t] = sum of weight[p] y[p] over the pairs of t, in their order, + gate * shared[t]

A program takes one block of pairs and some rows of their expert's weight. A row's sums are in the
same order wherever it is in a block, so its result does not depend on the tokens beside it, as long
as their number, which chooses the tile, is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.experts.routing import ExpertBlocks, Routes
from pippin.backends.torch.kernels.packed.numbers import arrays_of, constants_of, factor, number
from pippin.backends.torch.kernels.packed.sums import PackedTile, packed_sums
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.packed import Packed, Weight


@triton.jit
def tile_sums(
    sums,  # [tokens, rows]
    x_rows,  # pointers [tokens, 1]
    is_token,  # [tokens]
    weight,  # PackedArrays
    row,  # int64 [rows]: of the weight
    is_row,
    start,
    end,  # words
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`sums` and x W^T over some words of the weight's rows, by tensor cores."""
    per_group: tl.constexpr = GROUP // PER_WORD
    for first in tl.range(start, end, WORDS, num_stages=STAGES):
        w = first + tl.arange(0, WORDS)
        inside = (w < end)[:, None] & is_row[None, :]
        words = tl.load(
            weight.words + row[None, :] * (K // PER_WORD) + w[:, None], mask=inside, other=0
        )
        at = row[None, :] * (K // GROUP) + (w // per_group)[:, None]
        scale = factor(weight.scales, at, inside)
        if OFFSET:
            offset = tl.load(weight.offsets + at, mask=inside, other=0.0).to(tl.float32)
        channel = (w // per_group) * GROUP + w % per_group
        for part in tl.static_range(PER_WORD):
            x_at = x_rows + (channel + part * per_group)[None, :]
            x = tl.load(x_at, mask=is_token[:, None] & (w < end)[None, :], other=0.0)
            found = number(words, part, KIND) * scale
            if OFFSET:
                found += offset
            sums = tl.dot(x, found.to(x.dtype), sums, input_precision=PRECISION)
    return sums


SHARED_BYTES = 96 << 10  # of shared memory: what every GPU since Ampere has for a program
_SUMMED = 1024  # channels that a program adds up


@dataclass(frozen=True)
class ExpertTile:
    """Of a product: pairs, rows of the weight, and channels that are read at a time."""

    pairs: int
    rows: int
    channels: int
    num_warps: int

    def num_stages(self, itemsize: int) -> int:
        stage = (self.pairs + self.rows) * self.channels * itemsize
        return max(1, min(4, SHARED_BYTES // stage))


def expert_tile_for(
    num_tokens: int, pairs_per_expert: float, itemsize: int, *, packed: bool = False
) -> ExpertTile:
    """Few tokens cost what reading the weights costs; many are worth larger tiles."""
    channels = 256 // itemsize
    if packed and itemsize == 2 and (num_tokens == 1 or pairs_per_expert <= 1):
        return ExpertTile(1, 32, channels, 4)  # as one row is multiplied by dense layers
    if num_tokens <= 4:
        return ExpertTile(16, 32, channels, 4)
    if pairs_per_expert <= 16:
        return ExpertTile(16, 64, channels, 4)
    if pairs_per_expert <= 32:
        return ExpertTile(32, 64, channels, 4)
    if pairs_per_expert <= 128:
        return ExpertTile(64, 128, channels // 2, 4)
    return ExpertTile(128, 128, channels // 2, 8)


@triton.jit
def _expert_product(
    x,
    w,
    out,
    experts,
    order,
    firsts,
    ends,
    N,  # of the result
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    SWIGLU: tl.constexpr,  # gate and up of tokens, else down of pairs
    ORDERED: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    KIND: tl.constexpr = 0,
    GROUP: tl.constexpr = 0,
    PER_WORD: tl.constexpr = 0,  # numbers of a packed weight's word; 0: it is dense
    OFFSET: tl.constexpr = False,
    TWO_AT_A_TIME: tl.constexpr = False,
    COLUMNS: tl.constexpr = 0,
    WARPS: tl.constexpr = 0,
    RUNS: tl.constexpr = 0,
    PDL: tl.constexpr = False,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    block = tl.program_id(0)
    expert = tl.load(experts + block).to(tl.int64)
    i = tl.arange(0, PAIRS)
    if ORDERED:
        first = tl.load(firsts + block)
        is_pair = first + i < tl.load(ends + block)
        pair = tl.load(order + first + i, mask=is_pair, other=0)
        num_pairs = tl.load(ends + block) - first
    else:
        is_pair = i < 1
        pair = tl.where(is_pair, block, 0)
        num_pairs = 1
    if num_pairs > 0:
        source, num_rows = pair, N
        if SWIGLU:
            source, num_rows = pair // CHOSEN, 2 * N
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        in_n = n < N
        sums = tl.zeros([PAIRS, ROWS], tl.float32)
        sums2 = tl.zeros([PAIRS, ROWS], tl.float32)
        if PER_WORD > 0 and PAIRS == 1:
            first_row = expert * num_rows
            found, _ = packed_sums(
                x + source.to(tl.int64)[None, :, None] * K,
                None,
                w,
                first_row + tl.program_id(1) * ROWS,
                first_row + N - 1,
                N,
                K,
                KIND,
                GROUP,
                PER_WORD,
                OFFSET,
                TWO_AT_A_TIME,
                PAIRS,
                COLUMNS,
                ROWS,
                False,
                WARPS,
                RUNS,
                False,
            )
            if SWIGLU:
                sums, sums2 = tl.split(tl.permute(tl.reshape(found, [2, ROWS, PAIRS]), [2, 1, 0]))
            else:
                sums = tl.trans(found)
        elif PER_WORD > 0:
            words: tl.constexpr = CHANNELS // PER_WORD if CHANNELS >= 16 * PER_WORD else 16
            for up in tl.static_range(2 if SWIGLU else 1):
                found = tile_sums(
                    tl.zeros([PAIRS, ROWS], tl.float32),
                    x + source.to(tl.int64)[:, None] * K,
                    is_pair,
                    w,
                    expert * num_rows + n + up * N,
                    in_n,
                    0,
                    K // PER_WORD,
                    K,
                    KIND,
                    GROUP,
                    PER_WORD,
                    OFFSET,
                    words,
                    STAGES,
                    PRECISION,
                )
                if up == 0:
                    sums = found
                else:
                    sums2 = found
        else:
            w_rows = w + (expert * num_rows + n)[None, :] * K
            x_rows = x + source.to(tl.int64)[:, None] * K
            for start in tl.range(0, K, CHANNELS, num_stages=STAGES):
                k = start + tl.arange(0, CHANNELS)
                in_k = k < K
                is_x = is_pair[:, None] & in_k[None, :]
                rows = tl.load(x_rows + k[None, :], mask=is_x, other=0.0)
                inside = in_k[:, None] & in_n[None, :]
                weight = tl.load(w_rows + k[:, None], mask=inside, other=0.0)
                sums = tl.dot(rows, weight, sums, input_precision=PRECISION)
                if SWIGLU:
                    weight2 = tl.load(w_rows + N * K + k[:, None], mask=inside, other=0.0)
                    sums2 = tl.dot(rows, weight2, sums2, input_precision=PRECISION)
        if SWIGLU:
            # Rounded where plain operations round.
            gate = sums.to(out.dtype.element_ty).to(tl.float32)
            up = sums2.to(out.dtype.element_ty).to(tl.float32)
            sums = gate * tl.sigmoid(gate) * up
        at = out + pair.to(tl.int64)[:, None] * N + n[None, :]
        inside = is_pair[:, None] & in_n[None, :]
        tl.store(at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _weighted_sum(
    y,
    weights,
    residual,
    shared,
    shared_gate,
    out,
    N,
    CHOSEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    found = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        pair = token * CHOSEN + i
        weight = tl.load(weights + pair).to(tl.float32)
        found += weight * tl.load(y + pair * N + n, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        gate = tl.sigmoid(tl.load(shared_gate + token).to(tl.float32))
        found += gate * tl.load(shared + token * N + n, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        # Rounded where plain operations round.
        found = found.to(out.dtype.element_ty).to(tl.float32)
        found += tl.load(residual + token * N + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, found.to(out.dtype.element_ty), mask=inside)


def expert_product(
    x: torch.Tensor,  # [tokens, K] with `swiglu`, else [pairs, K]
    weight: Weight,  # [experts, N, K]; [experts, 2 N, K] with `swiglu`
    blocks: ExpertBlocks,
    num_pairs: int,
    num_chosen: int,
    tile: ExpertTile,
    *,
    swiglu: bool,
) -> torch.Tensor:
    """[pairs, N]"""
    assert x.is_contiguous()
    size, num_out = weight.shape[2], weight.shape[1] // (2 if swiglu else 1)
    rows = tile.rows // 2 if swiglu else tile.rows
    out = torch.empty(num_pairs, num_out, dtype=x.dtype, device=x.device)
    constants = {"K": size, "num_warps": tile.num_warps, **dependent(x.device)}
    if isinstance(weight, Packed) and tile.pairs == 1:
        constants |= PackedTile(1, tile.rows, tile.num_warps, 1).arguments(x, weight)
    elif isinstance(weight, Packed):
        constants |= constants_of(weight)
    _expert_product[(blocks.num_blocks, triton.cdiv(num_out, rows))](
        x,
        arrays_of(weight) if isinstance(weight, Packed) else weight.contiguous(),
        out,
        blocks.experts,
        blocks.order,
        blocks.firsts,
        blocks.ends,
        num_out,
        CHOSEN=num_chosen,
        SWIGLU=swiglu,
        ORDERED=blocks.order is not None,
        PAIRS=tile.pairs,
        ROWS=rows,
        CHANNELS=max(16, min(tile.channels, triton.next_power_of_2(size))),
        STAGES=tile.num_stages(x.element_size()),
        PRECISION=precision_of(x.dtype),
        **constants,
    )
    return out


def weighted_sum(
    y: torch.Tensor,  # [pairs, n]
    routes: Routes,
    residual: torch.Tensor | None = None,  # [tokens, n]
    shared: torch.Tensor | None = None,  # [tokens, n]
    shared_gate: torch.Tensor | None = None,  # [tokens, 1], before its sigmoid
) -> torch.Tensor:
    """[tokens, n]"""
    num_tokens, num_chosen = routes.weights.shape
    size = y.shape[1]
    out = torch.empty(num_tokens, size, dtype=y.dtype, device=y.device)
    _weighted_sum[(num_tokens, triton.cdiv(size, _SUMMED))](
        y,
        routes.weights,
        residual,
        shared,
        shared_gate,
        out,
        size,
        CHOSEN=num_chosen,
        RESIDUAL=residual is not None,
        SHARED=shared is not None,
        BLOCK=_SUMMED,
        num_warps=4,
        **dependent(y.device),
    )
    return out
