"""One token's latent attention over cells: queries that were brought to the latents, the softmax.

As in `step.py` a program takes one stretch of one row's tokens, here for a few heads,
which read the same cells; then the stretches are added up. The new token's cell has been written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.attention.blocks import add_values
from pippin.backends.torch.kernels.attention.step import _combine, _stretch, splits_for
from pippin.backends.torch.kernels.dependent import dependent
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.mixers import LatentLayer
from pippin.backends.torch.step.decode_inputs import Inputs

GROUP = 16  # heads of a program
BLOCK = 32  # tokens
MOST_SUMMED = 16384  # channels of stretches that are added up at once


@triton.jit
def _attend_latents(
    q,
    kv,
    table,
    slots,
    positions,
    partial,
    tops,
    masses,
    kv_stride,
    table_stride,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    stretch = _stretch(position + 1, SPLITS, BLOCK, LEAST)
    first = split * stretch
    if first > position:
        return
    end = tl.minimum(first + stretch, position + 1)
    head = tl.minimum(part * GROUP + tl.arange(0, GROUP), HEADS - 1)
    i, j = tl.arange(0, RANK), tl.arange(0, TURNED)
    queries = q + (row * HEADS + head[:, None]).to(tl.int64) * (RANK + TURNED)
    q_latent = tl.load(queries + i[None, :])
    q_turned = tl.load(queries + RANK + j[None, :])
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    found = tl.zeros([GROUP, RANK], tl.float32)
    cells_of = table + tl.load(slots + row).to(tl.int64) * table_stride
    for start in range(first, end, BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = t < end
        cell = kv + tl.load(cells_of + t, mask=inside, other=0).to(tl.int64) * kv_stride
        latent = tl.load(cell[:, None] + i[None, :], mask=inside[:, None], other=0.0)
        key = tl.load(cell[:, None] + RANK + j[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        scores += tl.dot(q_turned, tl.trans(key), input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        top, mass, found = add_values(scores, latent, top, mass, found, PRECISION)
    at = (row * HEADS + head) * SPLITS + split
    tl.store(partial + at[:, None] * RANK + i[None, :], found)
    tl.store(tops + at, top)
    tl.store(masses + at, mass)


def latent_step(
    q: torch.Tensor,  # [rows, heads, channels of a cell]
    layer: LatentLayer,
    kv: torch.Tensor,  # [cells, channels], a view of the pool
    table: torch.Tensor,  # int32 [slots, positions]
    inputs: Inputs,
) -> torch.Tensor:
    """[rows, heads, rank]: sums of latents."""
    shape = layer.shape
    num_rows, heads, rank = q.shape[0], shape.num_heads, shape.rank
    num_parts = triton.cdiv(heads, GROUP)
    splits, least = splits_for(num_rows * num_parts)
    splits = min(splits, max(1, MOST_SUMMED // rank))
    options = {"dtype": torch.float32, "device": q.device}
    parts = [torch.empty(num_rows, heads, splits, *size, **options) for size in ((rank,), (), ())]
    out = torch.empty(num_rows, heads, rank, dtype=q.dtype, device=q.device)
    sizes = {"HEADS": heads, "SPLITS": splits, "BLOCK": BLOCK, "LEAST": least}
    _attend_latents[(num_rows, num_parts, splits)](
        (q * shape.scale).contiguous(),
        kv,
        table,
        inputs.slot,
        inputs.position,
        *parts,
        kv.stride(0),
        table.stride(0),
        **sizes,
        RANK=rank,
        TURNED=shape.rope.dim,
        GROUP=GROUP,
        PRECISION=precision_of(q.dtype),
        num_warps=8,
        num_stages=2 if q.element_size() == 2 else 1,
    )
    _combine[(num_rows, heads)](
        q,  # there are no gates, no sinks and no windows
        *parts,
        inputs.position,
        out,
        0,
        None,
        0,
        **sizes,
        GATED=False,
        D=rank,
        SINKS=False,
        WINDOW=False,
        **dependent(q.device),
    )
    return out
