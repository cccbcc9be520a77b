"""One token of Gated DeltaNet after its convolution, as one kernel: norms of q and k, gates, the
recurrence, the gated norm. One program takes one value head of one row: all that it has to know.

Its time is that of reading and writing the states. Where there are more programs than a GPU runs at
once, each goes through its state a few columns at a time, which do not depend on each other: so
several programs fit a multiprocessor, and one of them reads while another writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.mixers import DeltaLayer, MambaLayer
from pippin.backends.torch.shapes import DeltaShape

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
