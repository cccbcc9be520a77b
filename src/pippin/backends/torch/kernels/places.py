"""The tokens of rows that verify drafts: what each looks up before a forward, and which drafts are
accepted behind it. Two kernels, one program a row. Computes no logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.base import MAX_STOP_IDS
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.step.decode_inputs import FIELDS, Inputs
from pippin.backends.torch.step.words import (
    FIRST_CELL,
    FIRST_STOP,
    VERIFY_FIELDS,
    Places,
    StepInputs,
)

_SLOT, _POSITION, _CELL = (tl.constexpr(FIELDS.index(n)) for n in ("slot", "position", "cell"))
_LOW, _HIGH = (tl.constexpr(FIELDS.index(n)) for n in ("key_low", "key_high"))
_EXACT, _LEAST, _DEPTH, _KEPT, _PROMPT, _DRAFTED, _LEFT = (
    tl.constexpr(len(FIELDS) + number) for number in range(len(VERIFY_FIELDS))
)
_FIELDS = tl.constexpr(len(FIELDS))
_FIRST_STOP, _FIRST_CELL = tl.constexpr(FIRST_STOP), tl.constexpr(FIRST_CELL)
_STOPS = tl.constexpr(MAX_STOP_IDS)


@triton.jit
def _expand(
    words,
    future,
    held_lengths,
    held_counts,
    held_drafts,
    table,
    out,
    tokens,
    drafts,
    starts,
    counts,
    waste_cell,
    table_stride,
    drafts_stride,
    num_rows,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,  # WIDTH, up to a power of two
    SPAN: tl.constexpr,
    SPAN_LANES: tl.constexpr,
):
    row = tl.program_id(0)
    own = words + row
    slot = tl.load(own + _SLOT * num_rows).to(tl.int64)
    least = tl.load(own + _LEAST * num_rows)
    depth = tl.load(own + _DEPTH * num_rows)
    most = tl.load(own + _POSITION * num_rows)
    exact = tl.load(own + _EXACT * num_rows)
    start = tl.where(exact != 0, most, tl.load(held_lengths + slot))
    num_kept = tl.load(own + _KEPT * num_rows)
    count = tl.where(num_kept > 0, tl.load(held_counts + slot), 0)
    tl.store(starts + row, start)
    tl.store(counts + row, count)

    n = tl.arange(0, SPAN_LANES)
    end = tl.where(slot > 0, most + 1 + depth, least)
    is_own = (n < SPAN) & (least + n < end)
    cell = tl.load(own + (_FIRST_CELL + n) * num_rows, mask=is_own, other=0)
    tl.store(table + slot * table_stride + least + n, cell, mask=is_own)

    j = tl.arange(0, LANES)
    inside = j < WIDTH
    live = inside & (j < tl.where(slot > 0, depth + 1, 0))
    at = start + j - least
    place = row * WIDTH + j
    proposed = own + (_FIRST_CELL + SPAN + at - 1) * num_rows
    is_draft = live & (j > 0) & (at - 1 < SPAN)
    draft = tl.load(proposed, mask=is_draft, other=-1)
    num_own = tl.where(tl.load(own + _DRAFTED * num_rows) != 0, depth, 0)
    is_own_draft = live & (j > 0) & (j <= num_own)
    draft = tl.load(held_drafts + slot * drafts_stride + j - 1, mask=is_own_draft, other=draft)
    tl.store(drafts + row * (WIDTH - 1) + j - 1, draft, mask=inside & (j > 0))
    token = tl.where(j == 0, tl.load(future + slot), tl.maximum(draft, 0))
    tl.store(tokens + place, token, mask=inside)

    num_tokens = num_rows * WIDTH
    for field in tl.static_range(_FIELDS):
        value = tl.load(own + field * num_rows)
        tl.store(out + field * num_tokens + place, tl.zeros([LANES], tl.int32) + value, mask=inside)
    tl.debug_barrier()
    new_cell = tl.load(own + (_FIRST_CELL + at) * num_rows, mask=live & (at < SPAN), other=0)
    tl.store(out + _SLOT * num_tokens + place, tl.where(live, slot, 0).to(tl.int32), mask=inside)
    tl.store(out + _POSITION * num_tokens + place, tl.where(live, start + j, 0), mask=inside)
    tl.store(out + _CELL * num_tokens + place, tl.where(live, new_cell, waste_cell), mask=inside)
    low = tl.load(own + _LOW * num_rows).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(own + _HIGH * num_rows).to(tl.int64)
    number = start + 1 + j - tl.load(own + _PROMPT * num_rows)
    key = ((high << 32) | low) + number.to(tl.int64)
    tl.store(out + _LOW * num_tokens + place, key.to(tl.int32), mask=inside)
    tl.store(out + _HIGH * num_tokens + place, (key >> 32).to(tl.int32), mask=inside)


def expand(
    step: StepInputs,
    future: FutureMap[torch.Tensor],
    table: torch.Tensor,  # int32 [slots, positions]: the rows' new cells are written
    waste_cell: int,
) -> Places:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=table.device)

    size = step.size
    num_rows, num_tokens = size.num_rows, size.num_placed
    inputs, tokens = empty(len(FIELDS), num_tokens), empty(num_tokens)
    drafts, starts, counts = empty(num_rows, size.depth), empty(num_rows), empty(num_rows)
    _expand[(num_rows,)](
        step.rows,
        future.tokens,
        future.lengths,
        future.counts,
        future.drafts,
        table,
        inputs,
        tokens,
        drafts,
        starts,
        counts,
        waste_cell,
        table.stride(0),
        future.drafts.stride(0),
        num_rows,
        WIDTH=size.width,
        LANES=triton.next_power_of_2(size.width),
        SPAN=size.span,
        SPAN_LANES=triton.next_power_of_2(size.span),
        num_warps=1,
    )
    return Places(step, Inputs(inputs), tokens, drafts, starts, counts)


@triton.jit
def _accept(
    words,
    drawn,
    drafts,
    starts,
    future,
    held_lengths,
    held_counts,
    out,
    num_rows,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    own = words + row
    slot = tl.load(own + _SLOT * num_rows)
    start = tl.load(starts + row)
    stops = tl.load(own + (_FIRST_STOP + tl.arange(0, _STOPS)) * num_rows)
    count = start * 0
    reached, is_nan, last = count + 1, count, count
    for j in tl.static_range(WIDTH):
        token = tl.load(drawn + row * WIDTH + j)
        nan = tl.load(drawn + num_rows * WIDTH + row * WIDTH + j)
        last = tl.where(reached != 0, token, last)
        is_nan = tl.where(reached != 0, is_nan | nan, is_nan)
        tl.store(out + (3 + j) * num_rows + row, token)
        if j < WIDTH - 1:
            stopped = tl.max((stops == token).to(tl.int32), axis=0)
            draft = tl.load(drafts + row * (WIDTH - 1) + j)
            right = (token == draft) & (stopped == 0)
            reached = tl.where(right, reached, 0)
            count += reached
    tl.store(out + row, count)
    tl.store(out + num_rows + row, start)
    tl.store(out + 2 * num_rows + row, is_nan)
    tl.store(future + slot, last)
    tl.store(held_lengths + slot, start + 1 + count)
    tl.store(held_counts + slot, count)


def accept(places: Places, drawn: torch.Tensor, future: FutureMap[torch.Tensor]) -> torch.Tensor:
    """int32 [3 + width, rows]: see `KernelForward.choose`. Row, length and count go by slot."""
    num_rows, width = places.step.size.num_rows, places.step.size.width
    out = torch.empty(3 + width, num_rows, dtype=torch.int32, device=drawn.device)
    _accept[(num_rows,)](
        places.step.rows,
        drawn,
        places.drafts,
        places.starts,
        future.tokens,
        future.lengths,
        future.counts,
        out,
        num_rows,
        WIDTH=width,
        num_warps=1,
    )
    return out
