"""Which experts tokens go to, and the tokens of each expert in blocks. Computes no products.

A pair is a token and one of its experts; pair `p` is of token `p // num_chosen`. Pairs are ordered
by expert, and those of one expert as they come, by counting: every expert's program goes through
all pairs. Then each expert's pairs are cut into blocks of a fixed size, of which there are as many
as there can be; blocks that are not needed have no pairs. All of it is the same in every run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
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
