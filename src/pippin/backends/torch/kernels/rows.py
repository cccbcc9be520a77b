"""Norms and gated products of many rows at once: what stands between large products.

Each is one pass over memory. A sum and the norm behind it are one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.parts import Norm
from pippin.backends.torch.step.decode_inputs import Inputs


@triton.jit
def _add_norm(
    x,
    y,
    weight,
    total,
    out,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * N
    i = tl.arange(0, BLOCK)
    inside = i < N
    found = tl.load(x + row + i, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        found += tl.load(y + row + i, mask=inside, other=0.0).to(tl.float32)
        found = found.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row + i, found.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(found * found) / N + eps)
    normed = found * scale * tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + row + i, normed.to(out.dtype.element_ty), mask=inside)


def norm_rows(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return add_norm(x, None, norm)[1]


def add_norm(
    x: torch.Tensor, y: torch.Tensor | None, norm: Norm | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y [rows, n], and its norm: itself, if there is none."""
    if norm is None or norm.centred:  # plain operations
        total = x if y is None else x + y
        return total, total if norm is None else norm(total)
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    _add_norm[(x.shape[0],)](
        x,
        y,
        norm.weight,
        total,
        out,
        norm.eps,
        N=x.shape[1],
        BLOCK=triton.next_power_of_2(x.shape[1]),
        ADD=y is not None,
        num_warps=4,
        **dependent(x.device),
    )
    return total, out


@triton.jit
def _look_up(
    embed,
    future,
    table,
    slots,
    positions,
    cells,
    out,
    stride,
    N,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)  # and only then allow the next one: this is a step's first kernel
    allow_next(PDL)
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(future + slot).to(tl.int64)
    found = tl.load(embed + token * N + i, mask=i < N, other=0.0)
    tl.store(out + row * N + i, found, mask=i < N)
    tl.store(table + slot * stride + tl.load(positions + row), tl.load(cells + row))


def look_up(
    embed: torch.Tensor,  # [vocab, n]
    future: torch.Tensor,  # int32 [slots]: the future map
    table: torch.Tensor,  # int32 [slots, positions]
    inputs: Inputs,
) -> torch.Tensor:
    """[rows, n]: the embeddings of the slots' tokens. Their new cells go into the table."""
    rows, size = (inputs.slot, inputs.position, inputs.cell), embed.shape[1]
    out = torch.empty(len(rows[0]), size, dtype=embed.dtype, device=embed.device)
    _look_up[(len(rows[0]), triton.cdiv(size, 1024))](
        embed,
        future,
        table,
        *rows,
        out,
        table.stride(0),
        size,
        BLOCK=1024,
        **dependent(out.device),
    )
    return out


@triton.jit
def _swiglu(x, out, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    allow_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < N
    gate = tl.load(x + row * 2 * N + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + i, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * N + i, y.to(out.dtype.element_ty), mask=inside)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[rows, 2 n], gate and up, to [rows, n]."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=x.dtype, device=x.device)
    grid = (num_rows, triton.cdiv(size, 1024))
    _swiglu[grid](x, out, N=size, BLOCK=1024, num_warps=4, **dependent(x.device))
    return out


@triton.jit
def _gated_norm(
    y,
    z,
    weight,
    out,
    z_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,  # from one head's to the next one's
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < D
    at = (token * HEADS + head) * D + i
    found = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * D + i, mask=inside, other=0.0).to(tl.float32)
    gate = gate * tl.sigmoid(gate)
    if GATE_FIRST:
        found = found * gate
    found = found * tl.rsqrt(tl.sum(found * found) / D + eps)
    found = found * tl.load(weight + head * WEIGHTS + i, mask=inside, other=0.0)
    if not GATE_FIRST:
        found = found * gate
    tl.store(out + at, found.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    y: torch.Tensor, z: torch.Tensor, norm: Norm, *, gate_first: bool = False
) -> torch.Tensor:
    """y [tokens, heads, channels], z and the result [tokens, heads * channels]. The norm's weight
    is that of every head, or of each."""
    tokens, heads, dim = y.shape
    out = torch.empty(tokens, heads * dim, dtype=z.dtype, device=z.device)
    block = triton.next_power_of_2(dim)
    _gated_norm[(tokens, heads)](
        y,
        z,
        norm.weight,
        out,
        z.stride(0),
        norm.eps,
        HEADS=heads,
        D=dim,
        BLOCK=block,
        WEIGHTS=0 if norm.weight.numel() == dim else dim,
        GATE_FIRST=gate_first,
        num_warps=1 if block <= 512 else 4,
        **dependent(y.device),
    )
    return out
