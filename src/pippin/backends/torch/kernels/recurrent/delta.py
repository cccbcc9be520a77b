"""Gated DeltaNet over rows that decode, after their projection: convolution and recurrence.

A step is one kernel: norms of q and k, gates, the recurrence, the gated norm. One program takes one
value head of one row: all that it has to know. Its time is that of reading and writing the states.
Where there are more programs than a GPU runs at once, each goes through its state a few columns at
a time, which do not depend on each other: so several programs fit a multiprocessor, and one of them
reads while another writes.

Rows that verify drafts run kept drafts that were accepted, the input token, whose state is written,
and the drafts, whose inputs are kept, in two kernels. The convolution reads a row's last inputs,
then kept ones, then new ones; inputs of gates pass through it. The recurrence takes some columns of
a state in each program, token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.mixers import DeltaLayer, MambaLayer
from pippin.backends.torch.shapes import DeltaShape
from pippin.backends.torch.step.words import Places

MANY_PROGRAMS = 132  # multiprocessors of an H200


@dataclass(frozen=True)
class StateTile:
    """How a program goes through its state."""

    columns: int
    num_warps: int
    num_stages: int


def state_tile_for(num_programs: int, num_columns: int) -> StateTile:
    if num_programs <= MANY_PROGRAMS:
        return StateTile(num_columns, 8, 1)
    return StateTile(min(32, num_columns), 4, 2)


def delta_sizes(shape: DeltaShape) -> dict[str, int]:
    """That every kernel over a state is compiled for."""
    return {
        "K_HEADS": shape.num_k_heads,
        "V_HEADS": shape.num_v_heads,
        "DK": shape.k_dim,
        "DV": shape.v_dim,
    }


@triton.jit
def _delta_step(
    projected,
    decay,
    dt_bias,
    norm,
    state,
    states_in,
    states_out,
    out,
    row_stride,
    state_stride,
    eps,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    parts: tl.constexpr = DV // COLUMNS
    x = projected + row.to(tl.int64) * row_stride
    i, c, p = tl.arange(0, DK), tl.arange(0, COLUMNS), tl.arange(0, parts)
    before = state + tl.load(states_in + row).to(tl.int64) * state_stride + head * DK * DV
    after = state + tl.load(states_out + row).to(tl.int64) * state_stride + head * DK * DV
    if parts == 1:  # a state is an earlier step's
        whole = tl.load(before + i[:, None] * DV + c[None, :])
    wait_for_previous(PDL)
    q = tl.load(x + key_head * DK + i).to(tl.float32)
    k = tl.load(x + K_HEADS * DK + key_head * DK + i).to(tl.float32)
    b = tl.load(x + channels + V_HEADS * DV + head).to(tl.float32)
    a = tl.load(x + channels + V_HEADS * DV + V_HEADS + head).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q) + 1e-6) * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
    a = a + tl.load(dt_bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    gate = tl.exp(tl.load(decay + head) * softplus)
    y = tl.zeros([parts, COLUMNS], tl.float32)
    for part in tl.range(0, parts, num_stages=STAGES):
        j = part * COLUMNS + c
        within = i[:, None] * DV + j[None, :]
        held = whole * gate if parts == 1 else tl.load(before + within) * gate
        v = tl.load(x + 2 * K_HEADS * DK + head * DV + j).to(tl.float32)
        added = (v - tl.sum(held * k[:, None], axis=0)) * tl.sigmoid(b)
        held += k[:, None] * added[None, :]
        tl.store(after + within, held)
        y = tl.where(p[:, None] == part, tl.sum(held * q[:, None], axis=0)[None, :], y)
    j = head * DV + p[:, None] * COLUMNS + c[None, :]
    scale = tl.rsqrt(tl.sum(tl.sum(y * y, axis=1), axis=0) / DV + eps)
    y = y * scale * tl.load(norm + p[:, None] * COLUMNS + c[None, :])
    z = tl.load(x + channels + j).to(tl.float32)
    y = y * z * tl.sigmoid(z)
    tl.store(out + row.to(tl.int64) * V_HEADS * DV + j, y.to(out.dtype.element_ty))


@triton.jit
def _conv_step(
    projected,
    conv,
    taps,
    bias,
    states_in,
    states_out,
    row_stride,
    conv_stride,
    num_channels,
    TAPS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < num_channels
    x = projected + row.to(tl.int64) * row_stride + c
    before = conv + tl.load(states_in + row).to(tl.int64) * conv_stride + c
    after = conv + tl.load(states_out + row).to(tl.int64) * conv_stride + c
    newest = tl.load(x, mask=inside, other=0.0)
    last = tl.load(taps + (TAPS - 1) * num_channels + c, mask=inside, other=0.0)
    found = newest.to(tl.float32) * last.to(tl.float32)
    if BIASED:
        found += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    older = tl.tuple(())
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(before + tap * num_channels, mask=inside, other=0.0)
        weight = tl.load(taps + tap * num_channels + c, mask=inside, other=0.0)
        found += value.to(tl.float32) * weight.to(tl.float32)
        older += (value,)
    for tap in tl.static_range(1, TAPS - 1):  # no load waits behind a store
        tl.store(after + (tap - 1) * num_channels, older[tap], mask=inside)
    tl.store(after + (TAPS - 2) * num_channels, newest, mask=inside)
    tl.store(x, (found * tl.sigmoid(found)).to(projected.dtype.element_ty), mask=inside)


def conv_step(
    projected: torch.Tensor,  # [rows, ..]: the first channels become convolved, in place
    layer: DeltaLayer | MambaLayer,
    conv: torch.Tensor,  # [slabs, taps - 1, channels], a view of the pool
    states_in: torch.Tensor,  # int32 [rows]
    states_out: torch.Tensor,
) -> None:
    """Where the product before it was not ours: its epilogue does the same otherwise."""
    num_taps, channels = layer.taps.shape
    _conv_step[(projected.shape[0], triton.cdiv(channels, 1024))](
        projected,
        conv,
        layer.taps,
        layer.conv_bias,
        states_in,
        states_out,
        projected.stride(0),
        conv.stride(0),
        channels,
        TAPS=num_taps,
        BIASED=layer.conv_bias is not None,
        BLOCK=1024,
        num_warps=4,
        **dependent(projected.device),
    )


def delta_step(
    projected: torch.Tensor,  # [rows, ..]: q, k and v behind convolution and silu | z | b | a
    layer: DeltaLayer,
    state: torch.Tensor,  # float32 [slabs, value heads, k_dim, v_dim], a view of the pool
    states_in: torch.Tensor,  # int32 [rows]
    states_out: torch.Tensor,
    tile: StateTile | None = None,
) -> torch.Tensor:
    """[rows, value heads * v_dim], what the last product reads."""
    shape = layer.shape
    num_rows = projected.shape[0]
    size = shape.num_v_heads * shape.v_dim
    tile = tile or state_tile_for(num_rows * shape.num_v_heads, shape.v_dim)
    out = torch.empty(num_rows, size, dtype=projected.dtype, device=projected.device)
    _delta_step[(num_rows, shape.num_v_heads)](
        projected,
        layer.decay,
        layer.dt_bias,
        layer.norm.weight,
        state,
        states_in,
        states_out,
        out,
        projected.stride(0),
        state.stride(0),
        layer.norm.eps,
        **delta_sizes(shape),
        COLUMNS=tile.columns,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **dependent(projected.device),
    )
    return out


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
