"""Mamba-2 after its convolution, as kernels: one token of a row, and many in blocks of 64.

A step is one kernel: the time step, the recurrence, the gate. One program takes one head of one
row; the norm, which is of several heads, comes behind it.

Blocks take two. The algebra is that of `plain/recurrent.py`. The first kernel does what needs no
state, of a block and a few heads that share B and C: time steps, decays, and how much each token
reads of those before it. The second goes through a row's blocks from state to state, in three
products each; it writes what the tokens read, and the states that are kept straight into their
slots. Products read the model's type; states, decays and sums are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.mixers import MambaLayer
from pippin.backends.torch.step.words import RecurrentInputs
from pippin.types import GRID


@triton.jit
def _mamba_step(
    projected,
    decay,
    dt_bias,
    skip,
    state,
    states_in,
    states_out,
    out,
    row_stride,
    state_stride,
    least_dt,
    most_dt,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    group = head // (HEADS // GROUPS)
    inner: tl.constexpr = HEADS * D
    channels: tl.constexpr = inner + 2 * GROUPS * N
    x_row = projected + row.to(tl.int64) * row_stride
    n, d = tl.arange(0, N), tl.arange(0, D)
    x = tl.load(x_row + head * D + d).to(tl.float32)
    b = tl.load(x_row + inner + group * N + n).to(tl.float32)
    c = tl.load(x_row + inner + GROUPS * N + group * N + n).to(tl.float32)
    z = tl.load(x_row + channels + head * D + d).to(tl.float32)
    dt = tl.load(x_row + channels + inner + head).to(tl.float32) + tl.load(dt_bias + head)
    dt = tl.maximum(dt, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(dt)))
    dt = tl.minimum(tl.maximum(dt, least_dt), most_dt)
    within = n[:, None] * D + d[None, :]
    before = state + tl.load(states_in + row).to(tl.int64) * state_stride + head * N * D
    after = state + tl.load(states_out + row).to(tl.int64) * state_stride + head * N * D
    held = tl.load(before + within) * tl.exp(tl.load(decay + head) * dt)
    held += b[:, None] * (x * dt)[None, :]
    tl.store(after + within, held)
    y = tl.sum(held * c[:, None], axis=0) + tl.load(skip + head) * x
    tl.store(out + row.to(tl.int64) * inner + head * D + d, y * z * tl.sigmoid(z))


def mamba_step(
    projected: torch.Tensor,  # [rows, ..]: x, B and C behind convolution and silu | z | dt
    layer: MambaLayer,
    state: torch.Tensor,  # float32 [slabs, heads, state_dim, head_dim], a view of the pool
    states_in: torch.Tensor,  # int32 [rows]
    states_out: torch.Tensor,
) -> torch.Tensor:
    """[rows, heads * head_dim], what the last product reads."""
    shape = layer.shape
    num_rows = projected.shape[0]
    out = torch.empty(num_rows, shape.inner, dtype=torch.float32, device=projected.device)
    _mamba_step[(num_rows, shape.num_heads)](
        projected,
        layer.decay,
        layer.dt_bias,
        layer.skip,
        state,
        states_in,
        states_out,
        out,
        projected.stride(0),
        state.stride(0),
        shape.least_dt,
        shape.most_dt,
        HEADS=shape.num_heads,
        GROUPS=shape.num_groups,
        N=shape.state_dim,
        D=shape.head_dim,
        num_warps=4 if shape.state_dim * shape.head_dim <= 8192 else 8,
    )
    return layer.normed(out).to(projected.dtype)


HEADS_TOGETHER = 8  # of one program of the first
_GRID = tl.constexpr(GRID)


class Decayed(NamedTuple):
    """What lies between the kernels, of every block and head."""

    scores: torch.Tensor  # [blocks, heads, 64, 64]: of a token's x, what each one reads
    from_start: torch.Tensor  # float32 [blocks, heads, 64]: what is left of the state before
    to_end: torch.Tensor  # float32 [blocks, heads, 64]: of a token's x, what the state keeps


@triton.jit
def _decay(
    mixed,
    gates,
    decay,
    dt_bias,
    blocks,
    decayed,
    gates_stride,
    least_dt,
    most_dt,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, first = tl.program_id(0), tl.program_id(1) * TOGETHER
    length = tl.load(blocks.length + block)
    if length == 0:  # padding, which no row goes through
        return
    channels: tl.constexpr = HEADS * D + 2 * GROUPS * N
    t, n = tl.arange(0, _GRID), tl.arange(0, N)
    inside = t < length
    token = tl.load(blocks.start + block).to(tl.int64) + t
    b_at = mixed + HEADS * D + first // (HEADS // GROUPS) * N
    b_at += token[:, None] * channels + n[None, :]
    b = tl.load(b_at, mask=inside[:, None], other=0.0)
    c = tl.load(b_at + GROUPS * N, mask=inside[:, None], other=0.0)
    products = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    sees = t[:, None] >= t[None, :]
    for head in range(first, first + TOGETHER):
        dt = tl.load(gates + token * gates_stride + head, mask=inside, other=0.0).to(tl.float32)
        dt += tl.load(dt_bias + head)
        dt = tl.maximum(dt, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(dt)))
        dt = tl.minimum(tl.maximum(dt, least_dt), most_dt)
        dt = tl.where(inside, dt, 0.0)
        log_gate = tl.load(decay + head) * dt
        since = tl.cumsum(log_gate, axis=0)
        between = tl.exp(tl.where(sees, since[:, None] - since[None, :], 0.0))
        scores = tl.where(sees, products * between * dt[None, :], 0.0)
        place = (block.to(tl.int64) * HEADS + head) * _GRID + t
        to_end = tl.exp(tl.sum(log_gate, axis=0) - since) * dt
        at = decayed.scores + place[:, None] * _GRID + t[None, :]
        tl.store(at, scores.to(decayed.scores.dtype.element_ty))
        tl.store(decayed.from_start + place, tl.exp(since))
        tl.store(decayed.to_end + place, to_end)


@triton.jit
def _scan(
    mixed,
    decayed,
    skip,
    state,
    inputs,
    out,
    state_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = inputs.blocks
    channels: tl.constexpr = HEADS * D + 2 * GROUPS * N
    t, n, d = tl.arange(0, _GRID), tl.arange(0, N), part * BLOCK_D + tl.arange(0, BLOCK_D)
    within = head * N * D + n[:, None] * D + d[None, :]
    held = tl.load(state + tl.load(inputs.states_in + row).to(tl.int64) * state_stride + within)
    weight = tl.load(skip + head)
    of_b = mixed + HEADS * D + head // (HEADS // GROUPS) * N
    first = tl.load(inputs.first_block + row).to(tl.int64)
    for block in range(first, first + tl.load(inputs.num_blocks + row)):
        inside = t < tl.load(blocks.length + block)
        token = tl.load(blocks.start + block).to(tl.int64) + t
        place = (block * HEADS + head) * _GRID + t
        x_at = mixed + token[:, None] * channels + head * D + d[None, :]
        x = tl.load(x_at, mask=inside[:, None], other=0.0)
        c_at = of_b + GROUPS * N + token[:, None] * channels + n[None, :]
        c = tl.load(c_at, mask=inside[:, None], other=0.0)
        y = tl.dot(c, held.to(x.dtype), input_precision=PRECISION)
        y *= tl.load(decayed.from_start + place)[:, None]
        seen = tl.load(decayed.scores + place[:, None] * _GRID + t[None, :])
        y = tl.dot(seen, x, y, input_precision=PRECISION)
        y += x.to(tl.float32) * weight
        y_at = (token[:, None] * HEADS + head) * D + d[None, :]
        tl.store(out + y_at, y.to(out.dtype.element_ty), mask=inside[:, None])
        # B is read transposed: [channels, tokens].
        b_at = of_b + token[None, :] * channels + n[:, None]
        b = tl.load(b_at, mask=inside[None, :], other=0.0)
        kept = (x.to(tl.float32) * tl.load(decayed.to_end + place)[:, None]).to(x.dtype)
        held *= tl.load(decayed.from_start + (block * HEADS + head) * _GRID + _GRID - 1)
        held = tl.dot(b, kept, held, input_precision=PRECISION)
        slab = tl.load(blocks.slab + block).to(tl.int64)
        if slab > 0:
            tl.store(state + slab * state_stride + within, held)


def mamba_blocks(
    mixed: torch.Tensor,  # [tokens, channels]: x, B and C behind convolution and silu
    gates: torch.Tensor,  # [tokens, heads]: what time steps are made of
    layer: MambaLayer,
    state: torch.Tensor,  # float32 [slabs, heads, state_dim, head_dim], a view of the pool
    inputs: RecurrentInputs,
) -> torch.Tensor:
    """[tokens, heads, head_dim], 0 for tokens of no block; states go where the blocks say."""
    shape, blocks = layer.shape, inputs.blocks
    heads, tokens = shape.num_heads, (blocks.start.shape[0], shape.num_heads, GRID)
    decayed = Decayed(
        torch.empty(*tokens, GRID, dtype=mixed.dtype, device=mixed.device),
        torch.empty(tokens, dtype=torch.float32, device=mixed.device),
        torch.empty(tokens, dtype=torch.float32, device=mixed.device),
    )
    out = torch.zeros(mixed.shape[0], heads, shape.head_dim, dtype=mixed.dtype, device=mixed.device)
    sizes = {"HEADS": heads, "GROUPS": shape.num_groups, "N": shape.state_dim}
    sizes |= {"D": shape.head_dim}
    together = math.gcd(heads // shape.num_groups, HEADS_TOGETHER)
    # A head's channels of a program of the second kernel. float32 has no tensor cores: a thread
    # that has fewer sums keeps most of them in registers.
    exact = mixed.dtype == torch.float32
    block_d, num_warps, num_stages = (16, 8, 1) if exact else (min(32, shape.head_dim), 4, 2)
    _decay[(tokens[0], heads // together)](
        mixed,
        gates,
        layer.decay,
        layer.dt_bias,
        blocks,
        decayed,
        gates.stride(0),
        shape.least_dt,
        shape.most_dt,
        **sizes,
        TOGETHER=together,
        PRECISION=precision_of(mixed.dtype),
        num_warps=num_warps,
    )
    _scan[(inputs.first_block.shape[0], heads, shape.head_dim // block_d)](
        mixed,
        decayed,
        layer.skip,
        state,
        inputs,
        out,
        state.stride(0),
        **sizes,
        BLOCK_D=block_d,
        PRECISION=precision_of(mixed.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
