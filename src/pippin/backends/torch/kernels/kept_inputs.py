"""The last inputs of a causal convolution after blocks of tokens: what the next chunk begins with.

One program takes some channels of one block. A block that is shorter than what is kept is its row's
only one, and takes the rest from what the row had before; that may lie where the new inputs go, so
all of it is read before any is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.step.chunk_inputs import BlockInputs

BLOCK = 256


@triton.jit
def _keep_inputs(
    x,
    conv,
    starts,
    lengths,
    row_starts,
    states_in,
    slabs,
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
    slab = tl.load(slabs + block).to(tl.int64)
    num_lines = tl.where(slab > 0, KEPT, 0)
    wanted = (line < num_lines) & (c < num_channels)
    token = tl.load(starts + block).to(tl.int64) + tl.load(lengths + block) - KEPT + line
    behind = token - tl.load(row_starts + block)  # the row's first token; below 0: before the chunk
    before = conv + tl.load(states_in + block).to(tl.int64) * conv_stride
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
    """Into the slabs of the blocks that have one."""
    kept, channels = conv.shape[1:]
    _keep_inputs[(blocks.slot.shape[0], triton.cdiv(channels, BLOCK))](
        x,
        conv,
        blocks.start,
        blocks.length,
        blocks.row_start,
        blocks.state_in,
        blocks.slab,
        x.stride(0),
        conv.stride(0),
        channels,
        KEPT=kept,
        LINES=triton.next_power_of_2(kept),
        BLOCK=BLOCK,
        num_warps=4,
    )
