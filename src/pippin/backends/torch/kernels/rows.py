"""Norms, gated products and convolutions of many rows at once: what stands between large products.

Each is one pass over memory. A sum and the norm behind it are one kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.models.parts import Norm
from pippin.backends.torch.step.chunk_inputs import BlockInputs
from pippin.backends.torch.step.decode_inputs import Inputs

KEPT_BLOCK = 256  # channels of a program that keeps inputs


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


@triton.jit(do_not_specialize=["num_tokens", "num_kept"])
def _conv_rows(
    x,
    conv,
    taps,
    inputs,
    states,
    out,
    x_stride,
    conv_stride,
    num_tokens,
    num_channels,
    num_kept,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`inputs` [TAPS, tokens]: places in [last inputs of rows | tokens], see `ConvIndex`."""
    token = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < num_channels
    found = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        place = tl.load(inputs + tap * num_tokens + token).to(tl.int64)
        kept = place < num_kept
        row = tl.load(states + tl.where(kept, place // (TAPS - 1), 0)).to(tl.int64)
        held = row * conv_stride + (place % (TAPS - 1)) * num_channels
        num_held = tl.where(kept, num_channels, 0)  # all of them come from here, or none
        value = tl.load(conv + held + c, mask=c < num_held, other=0.0)
        token_at = x + (place - num_kept) * x_stride
        fresh = tl.load(token_at + c, mask=(c >= num_held) & inside, other=0.0)
        weight = tl.load(taps + tap * num_channels + c, mask=inside, other=0.0).to(tl.float32)
        found += (value.to(tl.float32) + fresh.to(tl.float32)) * weight
    y = found * tl.sigmoid(found)
    tl.store(out + token.to(tl.int64) * num_channels + c, y.to(out.dtype.element_ty), mask=inside)


def conv_rows(
    x: torch.Tensor,  # [tokens, ..]: the first channels are convolved
    conv: torch.Tensor,  # [slabs, taps - 1, channels], a view of the pool
    taps: torch.Tensor,  # [taps, channels]
    inputs: torch.Tensor,  # int64 [taps, tokens]
    states: torch.Tensor,  # int64 [rows]: whose last inputs come first
) -> torch.Tensor:
    """[tokens, channels], behind silu."""
    num_taps, channels = taps.shape
    out = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
    _conv_rows[(x.shape[0], triton.cdiv(channels, 1024))](
        x,
        conv,
        taps,
        inputs,
        states,
        out,
        x.stride(0),
        conv.stride(0),
        x.shape[0],
        channels,
        states.shape[0] * (num_taps - 1),
        TAPS=num_taps,
        BLOCK=1024,
        num_warps=4,
    )
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
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, D)
    at = (token * HEADS + head) * D + i
    found = tl.load(y + at).to(tl.float32)
    gate = tl.load(z + token * z_stride + head * D + i).to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found) / D + eps) * tl.load(weight + i)
    tl.store(out + at, (found * gate * tl.sigmoid(gate)).to(out.dtype.element_ty))


def gated_norm(y: torch.Tensor, z: torch.Tensor, norm: Norm) -> torch.Tensor:
    """y [tokens, heads, channels], z and the result [tokens, heads * channels]."""
    tokens, heads, dim = y.shape
    out = torch.empty(tokens, heads * dim, dtype=z.dtype, device=z.device)
    _gated_norm[(tokens, heads)](
        y,
        z,
        norm.weight,
        out,
        z.stride(0),
        norm.eps,
        HEADS=heads,
        D=dim,
        num_warps=1,
        **dependent(y.device),
    )
    return out


@triton.jit
def _keep_inputs(
    x,
    conv,
    blocks,
    x_stride,
    conv_stride,
    num_channels,
    KEPT: tl.constexpr,
    LINES: tl.constexpr,  # KEPT, up to a power of two
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    line = tl.arange(0, LINES)[:, None]
    slab = tl.load(blocks.slab + block).to(tl.int64)
    num_lines = tl.where(slab > 0, KEPT, 0)
    wanted = (line < num_lines) & (c < num_channels)
    end = tl.load(blocks.start + block).to(tl.int64) + tl.load(blocks.length + block)
    token = end - KEPT + line
    behind = token - tl.load(blocks.row_start + block)  # below 0: before the chunk
    before = conv + tl.load(blocks.state_in + block).to(tl.int64) * conv_stride
    is_new = behind >= 0
    new = tl.load(x + token * x_stride + c, mask=wanted & is_new, other=0.0)
    old_at = before + (KEPT + behind) * num_channels + c
    old = tl.load(old_at, mask=wanted & (behind < 0), other=0.0)
    found = tl.where(is_new, new, old)
    tl.debug_barrier()
    tl.store(conv + slab * conv_stride + line * num_channels + c, found, mask=wanted)


def keep_inputs(
    x: torch.Tensor,  # [tokens, ..]: the first channels are convolved
    conv: torch.Tensor,  # [slabs, kept, channels], a view of the pool
    blocks: BlockInputs,
) -> None:
    """A convolution's last inputs after blocks of tokens, into the slabs of those that have one.

    One program takes some channels of one block. A block that is shorter than what is kept is its
    row's only one, and takes the rest from what the row had before; that may lie where the new
    inputs go, so all of it is read before any is written.
    """
    kept, channels = conv.shape[1:]
    _keep_inputs[(blocks.slot.shape[0], triton.cdiv(channels, KEPT_BLOCK))](
        x,
        conv,
        blocks,
        x.stride(0),
        conv.stride(0),
        channels,
        KEPT=kept,
        LINES=triton.next_power_of_2(kept),
        BLOCK=KEPT_BLOCK,
        num_warps=4,
    )
