"""One token of Gated DeltaNet after its convolution, as one kernel: norms of q and k, gates, the
recurrence, the gated norm. One program takes one value head of one row: all that it has to know.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.models.delta_layer import DeltaLayer


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
):
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head // (V_HEADS // K_HEADS)
    channels: tl.constexpr = 2 * K_HEADS * DK + V_HEADS * DV
    x = projected + row.to(tl.int64) * row_stride
    i, j = tl.arange(0, DK), tl.arange(0, DV)
    q = tl.load(x + key_head * DK + i).to(tl.float32)
    k = tl.load(x + K_HEADS * DK + key_head * DK + i).to(tl.float32)
    v = tl.load(x + 2 * K_HEADS * DK + head * DV + j).to(tl.float32)
    z = tl.load(x + channels + head * DV + j).to(tl.float32)
    b = tl.load(x + channels + V_HEADS * DV + head).to(tl.float32)
    a = tl.load(x + channels + V_HEADS * DV + V_HEADS + head).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q) + 1e-6) * (DK**-0.5)
    k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
    a = a + tl.load(dt_bias + head)
    softplus = tl.maximum(a, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(a)))
    gate = tl.exp(tl.load(decay + head) * softplus)
    within = head * DK * DV + i[:, None] * DV + j[None, :]
    before = tl.load(states_in + row).to(tl.int64) * state_stride
    after = tl.load(states_out + row).to(tl.int64) * state_stride
    held = tl.load(state + before + within) * gate
    added = (v - tl.sum(held * k[:, None], axis=0)) * tl.sigmoid(b)
    held += k[:, None] * added[None, :]
    tl.store(state + after + within, held)
    y = tl.sum(held * q[:, None], axis=0)
    y = y * tl.rsqrt(tl.sum(y * y) / DV + eps) * tl.load(norm + j)
    y = y * z * tl.sigmoid(z)
    at = row.to(tl.int64) * V_HEADS * DV + head * DV + j
    tl.store(out + at, y.to(out.dtype.element_ty))


@triton.jit
def _conv_step(
    projected,
    conv,
    taps,
    states_in,
    states_out,
    row_stride,
    conv_stride,
    num_channels,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < num_channels
    x = projected + row.to(tl.int64) * row_stride + c
    before = conv + tl.load(states_in + row).to(tl.int64) * conv_stride + c
    after = conv + tl.load(states_out + row).to(tl.int64) * conv_stride + c
    newest = tl.load(x, mask=inside, other=0.0)
    last = tl.load(taps + (TAPS - 1) * num_channels + c, mask=inside, other=0.0)
    found = newest.to(tl.float32) * last.to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(before + tap * num_channels, mask=inside, other=0.0)
        weight = tl.load(taps + tap * num_channels + c, mask=inside, other=0.0)
        found += value.to(tl.float32) * weight.to(tl.float32)
        if tap > 0:
            tl.store(after + (tap - 1) * num_channels, value, mask=inside)
    tl.store(after + (TAPS - 2) * num_channels, newest, mask=inside)
    tl.store(x, (found * tl.sigmoid(found)).to(projected.dtype.element_ty), mask=inside)


def conv_step(
    projected: torch.Tensor,  # [rows, ..]: the first channels become convolved, in place
    layer: DeltaLayer,
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
        states_in,
        states_out,
        projected.stride(0),
        conv.stride(0),
        channels,
        TAPS=num_taps,
        BLOCK=1024,
        num_warps=4,
    )


def delta_step(
    projected: torch.Tensor,  # [rows, ..]: q, k and v behind convolution and silu | z | b | a
    layer: DeltaLayer,
    state: torch.Tensor,  # float32 [slabs, value heads, k_dim, v_dim], a view of the pool
    states_in: torch.Tensor,  # int32 [rows]
    states_out: torch.Tensor,
) -> torch.Tensor:
    """[rows, value heads * v_dim], what the last product reads."""
    shape = layer.shape
    num_rows = projected.shape[0]
    size = shape.num_v_heads * shape.v_dim
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
        K_HEADS=shape.num_k_heads,
        V_HEADS=shape.num_v_heads,
        DK=shape.k_dim,
        DV=shape.v_dim,
        num_warps=8,
    )
    return out
