"""One token of Mamba-2 after its convolution, as one kernel: the time step, the recurrence, the
gate. One program takes one head of one row; the norm, which is of several heads, comes behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.models.mixers import MambaLayer


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
