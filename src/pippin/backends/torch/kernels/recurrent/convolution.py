"""Causal convolutions of prompts' chunks: what they make of every token, and what they keep."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.models.decoder import RecurrentLayer
from pippin.backends.torch.models.mixers import ConvLayer
from pippin.backends.torch.step.words import BlockInputs

KEPT_BLOCK = 256  # channels of a program that keeps inputs


@triton.jit(do_not_specialize=["num_tokens", "num_kept"])
def _conv_rows(
    x,
    conv,
    taps,
    bias,
    inputs,
    states,
    out,
    x_stride,
    conv_stride,
    num_tokens,
    num_channels,
    num_kept,
    TAPS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
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
    if BIAS:
        found += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        found = found * tl.sigmoid(found)
    tl.store(
        out + token.to(tl.int64) * num_channels + c, found.to(out.dtype.element_ty), mask=inside
    )


def conv_rows(
    x: torch.Tensor,  # [tokens, ..]: the first channels are convolved
    conv: torch.Tensor,  # [slabs, taps - 1, channels], a view of the pool
    layer: RecurrentLayer,
    inputs: torch.Tensor,  # int64 [taps, tokens]
    states: torch.Tensor,  # int64 [rows]: whose last inputs come first
) -> torch.Tensor:
    """[tokens, channels], behind silu where there is more than a convolution."""
    num_taps, channels = layer.taps.shape
    out = torch.empty(x.shape[0], channels, dtype=x.dtype, device=x.device)
    _conv_rows[(x.shape[0], triton.cdiv(channels, 1024))](
        x,
        conv,
        layer.taps,
        layer.conv_bias,
        inputs,
        states,
        out,
        x.stride(0),
        conv.stride(0),
        x.shape[0],
        channels,
        states.shape[0] * (num_taps - 1),
        TAPS=num_taps,
        BIAS=layer.conv_bias is not None,
        SILU=not isinstance(layer, ConvLayer),
        BLOCK=1024,
        num_warps=4,
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
