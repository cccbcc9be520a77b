"""Many tokens of Gated DeltaNet after their convolution, in two kernels over blocks of 64 tokens.

The algebra is that of `plain/recurrent.py`. The first kernel does all that needs no state,
for every block and head at once: it solves the triangular system and decays queries and keys. The
second goes through a row's blocks from state to state, in four products each; it writes what the
tokens read, and the states that are kept straight into their slots. What lies between the two is
kept in the model's type; states and sums are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.mixers import DeltaLayer
from pippin.backends.torch.step.words import RecurrentInputs
from pippin.types import GRID

BLOCK_V = 32  # of a head's value channels, to one program of the second kernel
_GRID = tl.constexpr(GRID)


class Solved(NamedTuple):
    """What lies between the kernels, of every block and value head."""

    writes: torch.Tensor  # [blocks, heads, 64, v_dim]
    reads: torch.Tensor  # [blocks, heads, 64, k_dim]
    queries: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor  # [blocks, heads, 64, 64]
    ends: torch.Tensor  # float32 [blocks, heads]: how the state decays


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=1) + 1e-6)[:, None]


@triton.jit
def _solve(
    mixed,
    gates,
    decay,
    dt_bias,
    blocks,
    solved,
    gates_stride,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(blocks.length + block)
    if length == 0:  # padding, which no row goes through
        return
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    kept = solved.writes.dtype.element_ty
    t, i, j = tl.arange(0, _GRID), tl.arange(0, DK), tl.arange(0, DV)
    inside = t < length
    token = tl.load(blocks.start + block).to(tl.int64) + t
    b = tl.load(gates + token * gates_stride + head, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(gates + token * gates_stride + V_HEADS + head, mask=inside, other=0.0)
    a = a.to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    log_gate = tl.where(inside, tl.load(decay + head) * softplus, 0.0)
    beta = tl.where(inside, tl.sigmoid(b), 0.0)
    decayed = tl.cumsum(log_gate, axis=0)
    whole = tl.sum(log_gate, axis=0)
    q_at = token[:, None] * channels + key_head * DK + i[None, :]
    k_at = q_at + K_HEADS * DK
    v_at = token[:, None] * channels + 2 * K_HEADS * DK + head * DV + j[None, :]
    k = _unit(tl.load(mixed + k_at, mask=inside[:, None], other=0.0).to(tl.float32))
    sees = t[:, None] >= t[None, :]
    below = t[:, None] > t[None, :]
    between = tl.exp(tl.where(sees, decayed[:, None] - decayed[None, :], 0.0))
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * beta[:, None]
    # (I + system)^-1 - I, by forward substitution: line n is -system[n] (I + the lines before it).
    inverse = tl.where(below, -system, 0.0)
    for n in range(1, _GRID):
        line = tl.sum(tl.where(t[:, None] == n, inverse, 0.0), axis=0)
        line += tl.sum(line[:, None] * inverse, axis=0)
        inverse = tl.where(t[:, None] == n, line[None, :], inverse)
    inverse += tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    first = (block.to(tl.int64) * V_HEADS + head) * _GRID
    of_keys = (first + t)[:, None] * DK + i[None, :]
    of_values = (first + t)[:, None] * DV + j[None, :]
    of_scores = (first + t)[:, None] * _GRID + t[None, :]
    k_in = k * (beta * tl.exp(decayed))[:, None]
    tl.store(solved.reads + of_keys, tl.dot(inverse, k_in, input_precision=PRECISION).to(kept))
    tl.store(solved.keys + of_keys, (k * tl.exp(whole - decayed)[:, None]).to(kept))
    tl.store(solved.ends + block.to(tl.int64) * V_HEADS + head, tl.exp(whole))
    q = _unit(tl.load(mixed + q_at, mask=inside[:, None], other=0.0).to(tl.float32)) * DK**-0.5
    seen = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    tl.store(solved.scores + of_scores, tl.where(sees, seen, 0.0).to(kept))
    tl.store(solved.queries + of_keys, (q * tl.exp(decayed)[:, None]).to(kept))
    v = tl.load(mixed + v_at, mask=inside[:, None], other=0.0).to(tl.float32) * beta[:, None]
    tl.store(solved.writes + of_values, tl.dot(inverse, v, input_precision=PRECISION).to(kept))


@triton.jit
def _scan(
    solved,
    state,
    inputs,
    out,
    state_stride,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = inputs.blocks
    kept = solved.writes.dtype.element_ty
    t, i, j = tl.arange(0, _GRID), tl.arange(0, DK), part * BLOCK_V + tl.arange(0, BLOCK_V)
    within = head * DK * DV + i[:, None] * DV + j[None, :]
    held = tl.load(state + tl.load(inputs.states_in + row).to(tl.int64) * state_stride + within)
    first = tl.load(inputs.first_block + row).to(tl.int64)
    for block in range(first, first + tl.load(inputs.num_blocks + row)):
        place = (block * V_HEADS + head) * _GRID + t
        of_keys = place[:, None] * DK + i[None, :]
        before = held.to(kept)
        read = tl.dot(tl.load(solved.reads + of_keys), before, input_precision=PRECISION)
        added = tl.load(solved.writes + place[:, None] * DV + j[None, :]).to(tl.float32) - read
        added = added.to(kept)
        y = tl.dot(tl.load(solved.queries + of_keys), before, input_precision=PRECISION)
        seen = tl.load(solved.scores + place[:, None] * _GRID + t[None, :])
        y = tl.dot(seen, added, y, input_precision=PRECISION)
        inside = t < tl.load(blocks.length + block)
        token = tl.load(blocks.start + block).to(tl.int64) + t
        y_at = (token[:, None] * V_HEADS + head) * DV + j[None, :]
        tl.store(out + y_at, y.to(out.dtype.element_ty), mask=inside[:, None])
        # Keys are read transposed: [channels, tokens].
        k_out = tl.load(solved.keys + place[None, :] * DK + i[:, None])
        held *= tl.load(solved.ends + block * V_HEADS + head)
        held = tl.dot(k_out, added, held, input_precision=PRECISION)
        slab = tl.load(blocks.slab + block).to(tl.int64)
        if slab > 0:
            tl.store(state + slab * state_stride + within, held)


def delta_blocks(
    mixed: torch.Tensor,  # [tokens, channels]: q, k and v behind convolution and silu
    gates: torch.Tensor,  # [tokens, ..]: b and a of each value head
    layer: DeltaLayer,
    state: torch.Tensor,  # float32 [slabs, value heads, k_dim, v_dim], a view of the pool
    inputs: RecurrentInputs,
) -> torch.Tensor:
    """[tokens, value heads, v_dim], 0 for tokens of no block; states go where the blocks say."""
    shape, blocks = layer.shape, inputs.blocks
    num_blocks, heads = blocks.start.shape[0], shape.num_v_heads

    def between(*size: int, dtype: torch.dtype = mixed.dtype) -> torch.Tensor:
        return torch.empty(num_blocks, heads, *size, dtype=dtype, device=mixed.device)

    reads, queries, keys = (between(GRID, shape.k_dim) for _ in range(3))
    scores, ends = between(GRID, GRID), between(dtype=torch.float32)
    solved = Solved(between(GRID, shape.v_dim), reads, queries, keys, scores, ends)
    out = torch.zeros(mixed.shape[0], heads, shape.v_dim, dtype=mixed.dtype, device=mixed.device)
    sizes = {"V_HEADS": heads, "DK": shape.k_dim, "DV": shape.v_dim}
    _solve[(num_blocks, heads)](
        mixed,
        gates,
        layer.decay,
        layer.dt_bias,
        blocks,
        solved,
        gates.stride(0),
        K_HEADS=shape.num_k_heads,
        **sizes,
        PRECISION=precision_of(mixed.dtype),
        num_warps=4,
    )
    block_v = min(BLOCK_V, shape.v_dim)
    _scan[(inputs.first_block.shape[0], heads, shape.v_dim // block_v)](
        solved,
        state,
        inputs,
        out,
        state.stride(0),
        BLOCK_V=block_v,
        **sizes,
        PRECISION=precision_of(mixed.dtype),
        num_warps=4,
        num_stages=2,
    )
    return out
