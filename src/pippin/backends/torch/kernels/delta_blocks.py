"""Many tokens of Gated DeltaNet after their convolution, in two kernels over blocks of 64 tokens.

The algebra is that of `recurrent/gated_delta.py`. The first kernel solves each block's triangular
system, all blocks and heads at once; the second goes through a row's blocks from state to state,
writes what each token reads, and the states that are kept straight into their slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.types import GRID

BLOCK_V = 32  # of a head's value channels, to one program of the second kernel
_GRID = tl.constexpr(GRID)


@dataclass(frozen=True)
class BlockTable:
    """Where rows' blocks lie, int64 on the device."""

    starts: torch.Tensor  # [blocks]: the first token
    lengths: torch.Tensor  # [blocks]: tokens, 64 but for a row's last block
    slabs: torch.Tensor  # [blocks]: which slot the state after it goes to; 0: none
    firsts: torch.Tensor  # [rows]: the first block
    counts: torch.Tensor  # [rows]: blocks


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _solve(
    mixed,
    gates,
    decay,
    dt_bias,
    starts,
    lengths,
    writes,
    reads,
    decays,
    gates_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    start = tl.load(starts + block).to(tl.int64)
    length = tl.load(lengths + block)
    t, i, j = tl.arange(0, _GRID), tl.arange(0, DK), tl.arange(0, DV)
    inside = t < length
    token = start + t
    b = tl.load(gates + token * gates_stride + head, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + token * gates_stride + V_HEADS + head, mask=inside, other=0.0)
    a = a.to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    log_gate = tl.where(inside, tl.load(decay + head) * softplus, 0.0)
    beta = tl.where(inside, tl.sigmoid(b), 0.0)
    decayed = tl.cumsum(log_gate, axis=0)
    k_at = token[:, None] * channels + K_HEADS * DK + key_head * DK + i[None, :]
    k = _unit(tl.load(mixed + k_at, mask=inside[:, None], other=0.0).to(tl.float32))
    below = t[:, None] > t[None, :]
    between = tl.exp(tl.where(below, decayed[:, None] - decayed[None, :], 0.0))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
    system = tl.where(below, system, 0.0)
    # (I + system)^-1 - I, by forward substitution: line n is -system[n] (I + the lines before it).
    inverse = -system
    for n in range(1, _GRID):
        line = tl.sum(tl.where(t[:, None] == n, inverse, 0.0), axis=0)
        line += tl.sum(line[:, None] * inverse, axis=0)
        inverse = tl.where(t[:, None] == n, line[None, :], inverse)
    inverse += tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    v_at = token[:, None] * channels + 2 * K_HEADS * DK + head * DV + j[None, :]
    v = tl.load(mixed + v_at, mask=inside[:, None], other=0.0).to(tl.float32)
    written = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
    read = tl.dot(inverse, k * (beta * tl.exp(decayed))[:, None], input_precision=PRECISION)
    place = (block.to(tl.int64) * V_HEADS + head) * _GRID + t
    tl.store(decays + place, decayed)
    tl.store(writes + place[:, None] * DV + j[None, :], written)
    tl.store(reads + place[:, None] * DK + i[None, :], read)


@triton.jit
def _scan(
    mixed,
    writes,
    reads,
    decays,
    state,
    states_in,
    starts,
    lengths,
    slabs,
    firsts,
    counts,
    out,
    state_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    t, i, j = tl.arange(0, _GRID), tl.arange(0, DK), part * BLOCK_V + tl.arange(0, BLOCK_V)
    within = head * DK * DV + i[:, None] * DV + j[None, :]
    held = tl.load(state + tl.load(states_in + row).to(tl.int64) * state_stride + within)
    first = tl.load(firsts + row)
    for block in range(first, first + tl.load(counts + row)):
        start = tl.load(starts + block).to(tl.int64)
        inside = t < tl.load(lengths + block)
        token = start + t
        at = token[:, None] * channels + key_head * DK + i[None, :]
        q = _unit(tl.load(mixed + at, mask=inside[:, None], other=0.0).to(tl.float32))
        at += K_HEADS * DK
        k = _unit(tl.load(mixed + at, mask=inside[:, None], other=0.0).to(tl.float32))
        q *= DK**-0.5
        place = (block * V_HEADS + head) * _GRID + t
        decayed = tl.load(decays + place)
        whole = tl.sum(tl.where(t == _GRID - 1, decayed, 0.0), axis=0)
        added = tl.load(writes + place[:, None] * DV + j[None, :])
        read = tl.load(reads + place[:, None] * DK + i[None, :])
        added -= tl.dot(read, held, input_precision=PRECISION)
        sees = t[:, None] >= t[None, :]
        between = tl.exp(tl.where(sees, decayed[:, None] - decayed[None, :], 0.0))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        scores = tl.where(sees, scores, 0.0)
        y = tl.dot(q * tl.exp(decayed)[:, None], held, input_precision=PRECISION)
        y = tl.dot(scores, added, y, input_precision=PRECISION)
        y_at = (token[:, None] * V_HEADS + head) * DV + j[None, :]
        tl.store(out + y_at, y.to(out.dtype.element_ty), mask=inside[:, None])
        k *= tl.exp(whole - decayed)[:, None]
        held = held * tl.exp(whole)
        held = tl.dot(tl.trans(k), added, held, input_precision=PRECISION)
        slab = tl.load(slabs + block).to(tl.int64)
        if slab > 0:
            tl.store(state + slab * state_stride + within, held)


def delta_blocks(
    mixed: torch.Tensor,  # [tokens, channels]: q, k and v behind convolution and silu
    gates: torch.Tensor,  # [tokens, ..]: b and a of each value head
    layer: DeltaLayer,
    state: torch.Tensor,  # float32 [slabs, value heads, k_dim, v_dim], a view of the pool
    states_in: torch.Tensor,  # int [rows]
    table: BlockTable,
) -> torch.Tensor:
    """[tokens, value heads, v_dim]; states go where the table says."""
    shape = layer.shape
    num_blocks, heads = table.starts.shape[0], shape.num_v_heads
    options = {"dtype": torch.float32, "device": mixed.device}
    writes = torch.empty(num_blocks, heads, GRID, shape.v_dim, **options)
    reads = torch.empty(num_blocks, heads, GRID, shape.k_dim, **options)
    decays = torch.empty(num_blocks, heads, GRID, **options)
    out = torch.empty(mixed.shape[0], heads, shape.v_dim, dtype=mixed.dtype, device=mixed.device)
    heads_and_dims = {
        "K_HEADS": shape.num_k_heads,
        "V_HEADS": heads,
        "DK": shape.k_dim,
        "DV": shape.v_dim,
        "PRECISION": precision_of(mixed.dtype),
    }
    _solve[(num_blocks, heads)](
        mixed,
        gates,
        layer.decay,
        layer.dt_bias,
        table.starts,
        table.lengths,
        writes,
        reads,
        decays,
        gates.stride(0),
        **heads_and_dims,
        num_warps=4,
    )
    block_v = min(BLOCK_V, shape.v_dim)
    _scan[(table.firsts.shape[0], heads, shape.v_dim // block_v)](
        mixed,
        writes,
        reads,
        decays,
        state,
        states_in,
        table.starts,
        table.lengths,
        table.slabs,
        table.firsts,
        table.counts,
        out,
        state.stride(0),
        BLOCK_V=block_v,
        **heads_and_dims,
        num_warps=4,
        num_stages=1,
    )
    return out
