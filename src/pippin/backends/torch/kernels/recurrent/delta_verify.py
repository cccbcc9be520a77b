"""Gated DeltaNet over the tokens of rows that verify drafts: kept drafts that were accepted, the
input token, whose state is written, and the drafts, whose inputs are kept. Two kernels.

The convolution reads a row's last inputs, then kept ones, then new ones; inputs of gates pass
through it. The recurrence takes some columns of a state in each program, token by token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.recurrent.delta_step import MANY_PROGRAMS, delta_sizes
from pippin.backends.torch.models.mixers import DeltaLayer
from pippin.backends.torch.step.words import Places

CONV_BLOCK = 256


def columns_for(num_heads: int, num_columns: int) -> int:
    """Columns of a state in one program: of one warp, which waits for no other between tokens."""
    return min(8 if num_heads <= MANY_PROGRAMS else 16, num_columns)


@triton.jit
def _convolved(inputs, weights, first: tl.constexpr, TAPS: tl.constexpr):
    """The convolution of TAPS inputs from the first on, behind silu."""
    found = inputs[first] * weights[0]
    for tap in tl.static_range(1, TAPS):
        found += inputs[first + tap] * weights[tap]
    return found * tl.sigmoid(found)


@triton.jit
def _conv_verify(
    projected,
    conv,
    kept,
    taps,
    slots,
    states_in,
    states_out,
    counts,
    mixed,
    replayed,
    row_stride,
    conv_stride,
    kept_stride,
    num_channels,
    width,
    gates_at,
    TAPS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_conv, inside = c < num_channels, c < width
    count = tl.load(counts + row)
    own = kept + tl.load(slots + row).to(tl.int64) * kept_stride
    before = conv + tl.load(states_in + row).to(tl.int64) * conv_stride
    after = conv + tl.load(states_out + row).to(tl.int64) * conv_stride
    held: tl.constexpr = TAPS - 1
    # Everything is loaded before anything is stored: a load behind a store would wait for it, and
    # what is read may lie where other threads write. What earlier steps left is loaded at once.
    weights, old = tl.tuple(()), tl.tuple(())
    for tap in tl.static_range(TAPS):
        found = tl.load(taps + tap * num_channels + c, mask=is_conv, other=0.0)
        weights += (found.to(tl.float32),)
    for tap in tl.static_range(held):
        found = tl.load(before + tap * num_channels + c, mask=is_conv, other=0.0)
        old += (found.to(tl.float32),)
    for t in tl.static_range(KEPT):
        found = tl.load(own + t * width + c, mask=inside & (c * 0 + t < count), other=0.0)
        old += (found.to(tl.float32),)
    last = tl.tuple(())  # before the new ones
    for tap in tl.static_range(held):
        found = old[tap]
        for t in tl.static_range(KEPT):
            found = tl.where(count == t + 1, old[tap + t + 1], found)
        last += (found,)
    wait_for_previous(PDL)
    column = tl.where(is_conv, c, c - num_channels + gates_at)
    new = projected + (row * WIDTH).to(tl.int64) * row_stride + column
    inputs = last
    for t in tl.static_range(WIDTH):
        found = tl.load(new + t * row_stride, mask=inside, other=0.0)
        inputs += (found.to(tl.float32),)
    tl.debug_barrier()
    for t in tl.static_range(KEPT):
        y = tl.where(is_conv, _convolved(old, weights, t, TAPS), old[held + t])
        at = replayed + (row * KEPT + t).to(tl.int64) * width + c
        tl.store(at, y.to(replayed.dtype.element_ty), mask=inside)
    for t in tl.static_range(WIDTH):
        y = _convolved(inputs, weights, t, TAPS)
        at = mixed + (row * WIDTH + t).to(tl.int64) * num_channels + c
        tl.store(at, y.to(mixed.dtype.element_ty), mask=is_conv)
    for tap in tl.static_range(held):  # behind the input token
        at = after + tap * num_channels + c
        tl.store(at, inputs[tap + 1].to(conv.dtype.element_ty), mask=is_conv)
    for t in tl.static_range(WIDTH - 1):
        raw = inputs[held + 1 + t].to(kept.dtype.element_ty)
        tl.store(own + t * width + c, raw, mask=inside)


def conv_verify(
    projected: torch.Tensor,  # [tokens, ..]
    layer: DeltaLayer,
    conv: torch.Tensor,  # [slabs, taps - 1, channels], a view of the pool
    kept: torch.Tensor,  # [slots, drafts, width]
    places: Places,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, channels] of new tokens and [rows, drafts, width] of kept ones, behind silu."""
    num_taps, channels = layer.taps.shape
    num_rows, num_kept, width = places.step.size.num_rows, kept.shape[1], kept.shape[2]
    options = {"dtype": projected.dtype, "device": projected.device}
    mixed = torch.empty(places.step.size.num_placed, channels, **options)
    replayed = torch.empty(num_rows, num_kept, width, **options)
    _conv_verify[(num_rows, triton.cdiv(width, CONV_BLOCK))](
        projected,
        conv,
        kept,
        layer.taps,
        places.step.column("slot"),
        places.step.column("state_in"),
        places.step.column("state_out"),
        places.counts,
        mixed,
        replayed,
        projected.stride(0),
        conv.stride(0),
        kept.stride(0),
        channels,
        width,
        channels + layer.shape.num_v_heads * layer.shape.v_dim,
        TAPS=num_taps,
        WIDTH=places.step.size.width,
        KEPT=num_kept,
        BLOCK=CONV_BLOCK,
        num_warps=4,
        **dependent(projected.device),
    )
    return mixed, replayed


@triton.jit
def _token(
    x,
    gates,
    decay,
    bias,
    head,
    key_head,
    i,
    j,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
):
    """What it does to columns j of a state: the share that stays, its key and value, and the share
    of the difference that is added."""
    k = tl.load(x + K_HEADS * DK + key_head * DK + i).to(tl.float32)
    v = tl.load(x + 2 * K_HEADS * DK + head * DV + j).to(tl.float32)
    b = tl.load(gates + head).to(tl.float32)
    a = tl.load(gates + V_HEADS + head).to(tl.float32) + bias
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    return tl.exp(decay * softplus), k * tl.rsqrt(tl.sum(k * k) + 1e-6), v, tl.sigmoid(b)


@triton.jit
def _advance(held, token):
    stays, k, v, share = token
    held = held * stays
    added = (v - tl.sum(held * k[:, None], axis=0)) * share
    return held + k[:, None] * added[None, :]


@triton.jit
def _delta_verify(
    projected,
    mixed,
    replayed,
    decay,
    dt_bias,
    state,
    states_in,
    states_out,
    counts,
    out,
    row_stride,
    state_stride,
    width,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    i, j = tl.arange(0, DK), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    within = head * DK * DV + i[:, None] * DV + j[None, :]
    before = state + tl.load(states_in + row).to(tl.int64) * state_stride
    after = state + tl.load(states_out + row).to(tl.int64) * state_stride
    own_decay, bias = tl.load(decay + head), tl.load(dt_bias + head)
    held = tl.load(before + within)  # an earlier step's
    count = tl.load(counts + row)
    wait_for_previous(PDL)
    # All tokens are loaded before anything is stored: a load behind a store would wait for it.
    accepted, tokens, queries = tl.tuple(()), tl.tuple(()), tl.tuple(())
    for t in tl.static_range(KEPT):  # those behind the last that was accepted are not used
        x = replayed + (row * KEPT + t).to(tl.int64) * width
        found = _token(
            x, x + channels, own_decay, bias, head, key_head, i, j, K_HEADS, V_HEADS, DK, DV
        )
        accepted += (found,)
    for t in tl.static_range(WIDTH):
        token = (row * WIDTH + t).to(tl.int64)
        x = mixed + token * channels
        gates = projected + token * row_stride + channels + V_HEADS * DV
        found = _token(x, gates, own_decay, bias, head, key_head, i, j, K_HEADS, V_HEADS, DK, DV)
        tokens += (found,)
        q = tl.load(x + key_head * DK + i).to(tl.float32)
        queries += (q * tl.rsqrt(tl.sum(q * q) + 1e-6) * (DK**-0.5),)
    for t in tl.static_range(KEPT):
        if t < count:
            held = _advance(held, accepted[t])
    for t in tl.static_range(WIDTH):
        held = _advance(held, tokens[t])
        if t == 0:
            tl.store(after + within, held)
        q = queries[t]
        y = tl.sum(held * q[:, None], axis=0)
        token = (row * WIDTH + t).to(tl.int64)
        tl.store(out + (token * V_HEADS + head) * DV + j, y)


def delta_verify(
    projected: torch.Tensor,  # [tokens, ..]: b and a are read
    mixed: torch.Tensor,  # [tokens, channels]
    replayed: torch.Tensor,  # [rows, drafts, width]
    layer: DeltaLayer,
    state: torch.Tensor,  # float32 [slabs, value heads, k_dim, v_dim], a view of the pool
    places: Places,
) -> torch.Tensor:
    """float32 [tokens, value heads, v_dim], before the gated norm."""
    shape, num_rows = layer.shape, places.step.size.num_rows
    columns = columns_for(num_rows * shape.num_v_heads, shape.v_dim)
    out = torch.empty(
        places.step.size.num_placed,
        shape.num_v_heads,
        shape.v_dim,
        dtype=torch.float32,
        device=projected.device,
    )
    _delta_verify[(num_rows, shape.num_v_heads, shape.v_dim // columns)](
        projected,
        mixed,
        replayed,
        layer.decay,
        layer.dt_bias,
        state,
        places.step.column("state_in"),
        places.step.column("state_out"),
        places.counts,
        out,
        projected.stride(0),
        state.stride(0),
        replayed.shape[2],
        **delta_sizes(shape),
        COLUMNS=columns,
        WIDTH=places.step.size.width,
        KEPT=replayed.shape[1],
        num_warps=1,
        **dependent(projected.device),
    )
    return out
