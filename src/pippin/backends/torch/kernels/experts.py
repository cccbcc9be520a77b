"""Feed-forward layers of experts in Triton: routing, products by expert, weighted sums.

No atomics, and nothing that the host has to know: which experts a token goes to never leaves the
device, so a captured graph depends on the number of tokens alone. A pair is a token and one of its
experts; pair `p` is of token `p // num_chosen`. Pairs are ordered by expert, those of one expert as
they come, by counting: every expert's program goes through all pairs. Then each expert's pairs are
cut into blocks of a fixed size, of which there are as many as there can be; blocks that are not
needed have no pairs. All of it is the same in every run.

    y[p] = down[e] (silu(gate[e] x[t]) * up[e] x[t])      of each pair p, a token t and an expert e
    out[t] = sum of weight[p] y[p] over the pairs of t, in their order, + gate * shared[t]

A program of the products takes one block of pairs and some rows of their expert's weight. A row's
sums are in the same order wherever it is in a block, so its result does not depend on the tokens
beside it, as long as their number, which chooses the tile, is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.packed.numbers import arrays_of, constants_of, factor, number
from pippin.backends.torch.kernels.packed.sums import PackedTile, packed_sums
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.packed import Packed, Weight
from pippin.backends.torch.shapes import ExpertShape

_SCANNED = 4096  # pairs that a program looks at together
_COMPARED = 4096  # blocks times experts, likewise


@triton.jit
def _route(
    logits,
    weights,
    chosen,
    E: tl.constexpr,
    CHOSEN: tl.constexpr,
    NORMALISED: tl.constexpr,
    BLOCK_E: tl.constexpr,  # E, up to a power of two
    BLOCK_C: tl.constexpr,  # CHOSEN, likewise
    PDL: tl.constexpr,
):
    """Of equal shares the first expert is chosen; of NaN any that exists."""
    allow_next(PDL)
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    e, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    inside = e < E
    x = tl.load(logits + token * E + e, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(inside, x, -3.0e38)
    mass = tl.where(inside, tl.exp(x - tl.max(x, axis=0)), 0.0)
    left = tl.where(inside, mass, -1.0)
    found = tl.zeros([BLOCK_C], tl.float32)
    places = tl.zeros([BLOCK_C], tl.int32)
    for i in tl.static_range(CHOSEN):
        best = tl.max(left, axis=0)
        place = tl.min(tl.where(left == best, e, E - 1), axis=0)
        found = tl.where(c == i, best, found)
        places = tl.where(c == i, place, places)
        left = tl.where(e == place, -1.0, left)
    found = found / tl.sum(mass, axis=0)
    if NORMALISED:
        found = found / tl.sum(found, axis=0)
    at = token * CHOSEN + c
    tl.store(weights + at, found.to(weights.dtype.element_ty), mask=c < CHOSEN)
    tl.store(chosen + at, places, mask=c < CHOSEN)


@triton.jit(do_not_specialize=["num_pairs"])
def _order(chosen, starts, order, num_pairs, BLOCK: tl.constexpr):
    """One expert: where its pairs start, and its pairs. The last program ends the last expert."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=0x7FFFFFFF)
        before += tl.sum((mine < expert).to(tl.int32), axis=0)
    tl.store(starts + expert, before)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        mine = tl.load(chosen + pair, mask=pair < num_pairs, other=0x7FFFFFFF) == expert
        rank = tl.cumsum(mine.to(tl.int32), axis=0)
        tl.store(order + before + rank - 1, pair, mask=mine)
        before += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_blocks"])
def _cut(
    starts,
    experts,
    firsts,
    ends,
    num_blocks,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks: their expert, and their pairs in the order."""
    block = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_E)
    start = tl.load(starts + e, mask=e < E, other=0)
    end = tl.load(starts + e + 1, mask=e < E, other=0)
    count = (end - start + SIZE - 1) // SIZE
    up_to = tl.cumsum(count, axis=0)
    expert = tl.sum((up_to[None, :] <= block[:, None]).to(tl.int32), axis=1)
    is_its = e[None, :] == expert[:, None]  # of none, where the block is not needed
    begin = start - (up_to - count) * SIZE
    first = tl.sum(tl.where(is_its, begin[None, :], 0), axis=1) + block * SIZE
    last = tl.sum(tl.where(is_its, end[None, :], 0), axis=1)
    inside = block < num_blocks
    tl.store(experts + block, tl.where(expert < E, expert, 0), mask=inside)
    tl.store(firsts + block, first, mask=inside)
    tl.store(ends + block, tl.minimum(first + SIZE, last), mask=inside)


@dataclass(frozen=True)
class Routes:
    weights: torch.Tensor  # [tokens, chosen], in the logits' type
    chosen: torch.Tensor  # int32 [tokens, chosen]


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of pairs of one expert each. Where `order` is None every pair is a block."""

    num_blocks: int
    experts: torch.Tensor  # int32 [blocks]
    order: torch.Tensor | None = None  # int32 [pairs]
    firsts: torch.Tensor | None = None  # int32 [blocks], in the order
    ends: torch.Tensor | None = None


def route(logits: torch.Tensor, shape: ExpertShape) -> Routes:
    """logits [tokens, experts]"""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, shape.num_chosen, dtype=logits.dtype, device=logits.device)
    chosen = torch.empty(num_tokens, shape.num_chosen, dtype=torch.int32, device=logits.device)
    _route[(num_tokens,)](
        logits,
        weights,
        chosen,
        E=num_experts,
        CHOSEN=shape.num_chosen,
        NORMALISED=shape.normalised,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_C=triton.next_power_of_2(shape.num_chosen),
        num_warps=1,
        **dependent(logits.device),
    )
    return Routes(weights, chosen)


def most_blocks(num_pairs: int, num_experts: int, size: int) -> int:
    """Whatever the routes are: full ones, and one of each expert that is not full."""
    return min(num_pairs, num_pairs // size + num_experts)


def blocks_of(chosen: torch.Tensor, num_experts: int, size: int) -> ExpertBlocks:
    """Of pairs, int32 [tokens, chosen], in blocks of `size`."""
    num_pairs, device = chosen.numel(), chosen.device
    if chosen.shape[0] == 1:
        return ExpertBlocks(num_pairs, chosen)
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    block = min(_SCANNED, triton.next_power_of_2(num_pairs))
    warps = 8 if block > 1024 else 4
    _order[(num_experts + 1,)](chosen, starts, order, num_pairs, BLOCK=block, num_warps=warps)
    num_blocks = most_blocks(num_pairs, num_experts, size)
    experts, firsts, ends = torch.empty(3, num_blocks, dtype=torch.int32, device=device).unbind(0)
    block_e = triton.next_power_of_2(num_experts)
    per_program = max(1, _COMPARED // block_e)
    _cut[(triton.cdiv(num_blocks, per_program),)](
        starts,
        experts,
        firsts,
        ends,
        num_blocks,
        E=num_experts,
        SIZE=size,
        BLOCK_E=block_e,
        BLOCK=per_program,
        num_warps=4,
    )
    return ExpertBlocks(num_blocks, experts, order, firsts, ends)


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
