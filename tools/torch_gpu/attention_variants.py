"""Variants of the kernels of `kernels/attention/step.py`, for `attention_tiles` to time.

They differ in who takes which stretch (GRID: a program for each stretch that a row could have; FOUND: each program
looks for its stretch among the lengths of all rows; LISTED: a kernel before them writes a list), in how keys arrive
(one or two blocks ahead in registers, or asynchronous copies; the first ones by way of the L2), in how many heads of keys a program takes, and in
whether a row of one stretch is finished at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pippin.backends.torch.kernels.attention.blocks import add_values, capped
from pippin.backends.torch.kernels.attention.step import _begin, _block, _cells, _scores, normed_heads
from pippin.backends.torch.kernels.dependent import allow_next, wait_for_previous

GRID, FOUND, LISTED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
RUNTIME = ["num_rows", "programs", "splits", "least", "window"]
WORDS = tl.constexpr(8)  # of an item of a list: row, slot, first, position, stretch, number of the row's stretches


@triton.jit
def _stretch(num_seen, splits, BLOCK: tl.constexpr, least):
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, splits), BLOCK) * BLOCK, least)


@triton.jit
def _counts(positions, num_rows, programs, least, window, WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Of all rows: positions, stretches, and the tokens of one, so many that there are programs for all."""
    r = tl.arange(0, ROWS)
    position = tl.load(positions + r, mask=r < num_rows, other=-1)
    seen = position + 1 - _begin(position, window, WINDOW)
    seen = tl.where(r < num_rows, seen, 0)
    stretch = _stretch(tl.sum(seen, axis=0), programs - num_rows, BLOCK, least)
    return position, tl.cdiv(seen, stretch), stretch


@triton.jit(do_not_specialize=RUNTIME)
def _list(
    slots, positions, items, rows, num_rows, programs, least, window,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row writes its stretches; one more marks the items that are left."""
    allow_next(PDL)
    wait_for_previous(PDL)
    row, r, j = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, 64)
    _, counts, stretch = _counts(positions, num_rows, programs, least, window, WINDOW, ROWS, BLOCK)
    before = tl.sum(tl.where(r < row, counts, 0), axis=0)
    if row == num_rows:
        for start in range(before, programs, 64):
            tl.store(items + (start + j) * WORDS, j * 0 - 1, mask=start + j < programs)
    else:
        count = tl.sum(tl.where(r == row, counts, 0), axis=0)
        position, slot = tl.load(positions + row), tl.load(slots + row)
        tl.store(rows + row * 2, before)
        tl.store(rows + row * 2 + 1, count)
        for start in range(0, count, 64):
            at, inside = items + (before + start + j) * WORDS, start + j < count
            tl.store(at, j * 0 + row, mask=inside)
            tl.store(at + 1, j * 0 + slot, mask=inside)
            tl.store(at + 2, _begin(position, window, WINDOW) + (start + j) * stretch, mask=inside)
            tl.store(at + 3, j * 0 + position, mask=inside)
            tl.store(at + 4, j * 0 + stretch, mask=inside)
            tl.store(at + 5, j * 0 + count, mask=inside)


@triton.jit(do_not_specialize=RUNTIME)
def _attend(
    qkv, q_norm, k_norm, cos_table, sin_table, kv, table, slots, positions, cells, items, partial, tops, masses, out,
    sinks, row_stride, kv_stride, table_stride, eps, scale, softcap, window, num_rows, programs, splits, least,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GATED: tl.constexpr, NORM: tl.constexpr, D: tl.constexpr,
    ROTATED: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BY: tl.constexpr,
    LAST_FIRST: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr, TOGETHER: tl.constexpr, ALONE: tl.constexpr,
    TOUCH: tl.constexpr, TOUCHING: tl.constexpr,
):  # fmt: skip
    allow_next(PDL)
    kv_group = tl.program_id(0)
    per_kv: tl.constexpr = HEADS // KV_HEADS
    taken: tl.constexpr = per_kv * TOGETHER  # query heads of this program
    half: tl.constexpr = ROTATED // 2
    width: tl.constexpr = TOGETHER * D
    if BY == GRID:
        row, split = tl.program_id(1), tl.program_id(2)
        if LAST_FIRST:
            split = splits - 1 - split
        position, slot = tl.load(positions + row), tl.load(slots + row)
        begin = _begin(position, window, WINDOW)
        stretch = _stretch(position + 1 - begin, splits, BLOCK, least)
        first = begin + split * stretch
        if first > position:
            return
        is_alone = stretch > position - begin
        at = row * HEADS * splits + split
        step = splits
    elif BY == FOUND:
        number, r = tl.program_id(1), tl.arange(0, ROWS)
        at_rows, counts, stretch = _counts(positions, num_rows, programs, least, window, WINDOW, ROWS, BLOCK)
        row = tl.sum((tl.cumsum(counts, axis=0) <= number).to(tl.int32), axis=0)
        if row >= num_rows:
            return
        slot = tl.load(slots + row)
        split = number - tl.sum(tl.where(r < row, counts, 0), axis=0)
        position = tl.sum(tl.where(r == row, at_rows, 0), axis=0)
        begin = _begin(position, window, WINDOW)
        first = begin + split * stretch
        is_alone = stretch > position - begin
        at = number * HEADS
        step = 1
    else:
        number = tl.program_id(1)
        item = items + number * WORDS
        row, slot, first, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        stretch, count = tl.load(item + 4), tl.load(item + 5)
        if row < 0:
            return
        is_alone = count == 1
        at = number * HEADS
        step = 1
    end = tl.minimum(first + stretch, position + 1)
    cells_of = table + slot.to(tl.int64) * table_stride
    here = kv + kv_group * width
    values = KV_HEADS * D
    if TOUCH > 0:  # the first tokens' keys and values are on their way to the L2 before anything else is done
        touched, _ = _cells(cells_of, first + tl.arange(0, TOUCH), end, position, kv_stride)
        pieces = (here + touched[:, None] + (tl.arange(0, 2) * values)[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(TOUCHING, "=r,l", [pieces], dtype=tl.int32, is_pure=False, pack=1)
    n, g, i, w = tl.arange(0, BLOCK), tl.arange(0, GROUP), tl.arange(0, D), tl.arange(0, width)
    if AHEAD > 0:
        cell, is_old = _cells(cells_of, first + n, end, position, kv_stride)
        cell_1, old_1 = _cells(cells_of, first + BLOCK + n, end, position, kv_stride)
        if AHEAD == 2:
            cell_2, old_2 = _cells(cells_of, first + 2 * BLOCK + n, end, position, kv_stride)
        k, v = _block(here, values, cell, is_old, w)
        if AHEAD == 2:
            k_1, v_1 = _block(here, values, cell_1, old_1, w)
    h = tl.arange(0, TOGETHER)
    own = tl.minimum(g, taken - 1) // per_kv  # of the heads of keys, the one of a query head
    head = kv_group * taken + tl.minimum(g, taken - 1)
    rotates = i < ROTATED
    partner = tl.where(rotates, tl.where(i < half, i + half, i - half), i)
    turn = position.to(tl.int64) * half + tl.where(i < half, i, i - half)
    cos = tl.load(cos_table + turn, mask=rotates, other=1.0)
    sin = tl.load(sin_table + turn, mask=rotates, other=0.0)
    wait_for_previous(PDL)
    x = qkv + row.to(tl.int64) * row_stride
    keys = x + HEADS * D * (2 if GATED else 1) + kv_group * width
    q = normed_heads(x + head[:, None] * D, q_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
    q = (q * scale).to(kv.dtype.element_ty)
    if TOGETHER > 1:  # a query head is zero where other heads' keys are
        is_own = own[:, None, None] == h[None, :, None]
        q = tl.reshape(tl.where(is_own, q[:, None, :], 0.0), [GROUP, width]).to(kv.dtype.element_ty)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    found = tl.zeros([GROUP, width], tl.float32)
    if AHEAD == 0:
        for start in tl.range(first, end, BLOCK, num_stages=STAGES):
            cell, is_old = _cells(cells_of, start + n, end, position, kv_stride)
            k, v = _block(here, values, cell, is_old, w)
            scores = _scores(q, k, is_old, softcap, SOFTCAP, PRECISION)
            top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
    elif AHEAD == 1:
        for start in tl.range(first, end, BLOCK, num_stages=1):
            next_k, next_v = _block(here, values, cell_1, old_1, w)
            cell, later = _cells(cells_of, start + 2 * BLOCK + n, end, position, kv_stride)
            scores = _scores(q, k, is_old, softcap, SOFTCAP, PRECISION)
            top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
            k, v, is_old = next_k, next_v, old_1
            cell_1, old_1 = cell, later
    else:
        for start in tl.range(first, end, BLOCK, num_stages=1):
            next_k, next_v = _block(here, values, cell_2, old_2, w)
            cell, later = _cells(cells_of, start + 3 * BLOCK + n, end, position, kv_stride)
            scores = _scores(q, k, is_old, softcap, SOFTCAP, PRECISION)
            top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
            k, v, is_old = k_1, v_1, old_1
            k_1, v_1, old_1 = next_k, next_v, old_2
            cell_2, old_2 = cell, later
    if end == position + 1:  # the new token is in this stretch
        k_new = normed_heads(keys + h[:, None] * D, k_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
        k_new = tl.reshape(k_new, [width]).to(kv.dtype.element_ty)
        v_new = tl.load(keys + KV_HEADS * D + w)
        new = here + tl.load(cells + row).to(tl.int64) * kv_stride + w
        tl.store(new, k_new)
        tl.store(new + KV_HEADS * D, v_new.to(kv.dtype.element_ty))
        score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], axis=1)
        if SOFTCAP:
            score = capped(score, softcap)
        highest = tl.maximum(top, score)
        weight = tl.exp(score - highest)
        shrink = tl.exp(top - highest)
        mass = mass * shrink + weight
        found = found * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        top = highest
    kept = (g < taken)[:, None] & (own[:, None] == (w // D)[None, :])
    if ALONE and is_alone:
        if SINKS:
            sink = tl.load(sinks + head)
            highest = tl.maximum(top, sink)
            shrink = tl.exp(top - highest)
            mass = mass * shrink + tl.exp(sink - highest)
            found = found * shrink[:, None]
        found = found / mass[:, None]
        into = head[:, None] * D + (w % D)[None, :]
        if GATED:
            gate = tl.load(x + HEADS * D + into, mask=kept, other=0.0)
            found = found * tl.sigmoid(gate.to(tl.float32))
        tl.store(out + row.to(tl.int64) * (HEADS * D) + into, found.to(out.dtype.element_ty), mask=kept)
    else:
        place = at + head * step
        tl.store(tops + place, top, mask=g < taken)
        tl.store(masses + place, mass, mask=g < taken)
        tl.store(partial + place[:, None] * D + (w % D)[None, :], found, mask=kept)


@triton.jit(do_not_specialize=RUNTIME)
def _sum(
    qkv, partial, tops, masses, positions, rows, out, sinks, row_stride, window, num_rows, programs, splits, least,
    HEADS: tl.constexpr, GATED: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, BY: tl.constexpr, ALONE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """As many stretches as the row has, PARTS at a time."""
    allow_next(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    if BY == GRID:
        position = tl.load(positions + row)
        begin = _begin(position, window, WINDOW)
        count = tl.cdiv(position + 1 - begin, _stretch(position + 1 - begin, splits, BLOCK, least))
        before = (row * HEADS + head) * splits
        step = 1
    elif BY == FOUND:
        r = tl.arange(0, ROWS)
        _, counts, _ = _counts(positions, num_rows, programs, least, window, WINDOW, ROWS, BLOCK)
        count = tl.sum(tl.where(r == row, counts, 0), axis=0)
        before = tl.sum(tl.where(r < row, counts, 0), axis=0) * HEADS + head
        step = HEADS
    else:
        before, count = tl.load(rows + row * 2) * HEADS + head, tl.load(rows + row * 2 + 1)
        step = HEADS
    wait_for_previous(PDL)
    if ALONE and count == 1:
        return
    s, i = tl.arange(0, PARTS), tl.arange(0, D)
    nothing: tl.constexpr = float("-inf")
    if SINKS:
        highest = tl.load(sinks + head)
    else:
        highest = tl.load(tops + before)
    mass = 0.0
    if SINKS:  # a key without a value
        mass = 1.0
    y = tl.zeros([D], tl.float32)
    for start in range(0, count, PARTS):
        has_run = start + s < count
        at = before + (start + s) * step
        top = tl.load(tops + at, mask=has_run, other=nothing)
        mass_of = tl.load(masses + at, mask=has_run, other=0.0)
        parts = tl.load(partial + at[:, None] * D + i[None, :], mask=has_run[:, None], other=0.0)
        higher = tl.maximum(highest, tl.max(top, axis=0))
        shrink = tl.exp(highest - higher)
        weights = tl.exp(top - higher)
        mass = mass * shrink + tl.sum(weights * mass_of, axis=0)
        y = y * shrink + tl.sum(parts * weights[:, None], axis=0)
        highest = higher
    y = y / mass
    if GATED:
        gate = tl.load(qkv + row.to(tl.int64) * row_stride + (HEADS + head) * D + i)
        y = y * tl.sigmoid(gate.to(tl.float32))
    tl.store(out + (row * HEADS + head) * D + i, y.to(out.dtype.element_ty))
