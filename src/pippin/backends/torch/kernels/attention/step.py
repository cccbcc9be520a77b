"""One token's attention over cells: norms, rotation, the new cell, the softmax, the gate; and of
latents, the softmax alone. Beside it heads of several tokens: norms, rotation, their cells.

Two kernels attend. Of the first, one program takes one stretch of one row's tokens, for all query
heads that share a key head; that of the last stretch also makes the new token's key and value and
writes them into their cell, while it uses its own copy of them. The second adds the stretches up.
Lengths are looked up, so a captured graph serves rows of any length: there are as many programs as
a long row needs, and those for which a short one has no stretch end at once. Keys and values of a
few rows are read into registers a block ahead; those of many, with many programs at a time, by
asynchronous copies, of which more are under way.

Of latents a program takes a few heads, which read the same cells: queries were brought to the
latents, and the new token's cell has been written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.attention.blocks import add_values, capped
from pippin.backends.torch.kernels.dependent import allow_next, dependent, wait_for_previous
from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.mixers import AttentionLayer, LatentLayer
from pippin.backends.torch.step.decode_inputs import Inputs

PROGRAMS = 264  # of the first kernel that work, about: two for each processor of a large GPU
MOST_PROGRAMS = 16_384  # of it in all, where rows could be long
AMPLE_PROGRAMS = 1024  # of it, which leave each row OF_LONG_ROWS stretches at least
OF_LONG_ROWS, MOST_SPLITS = 16, 64  # stretches of a row
LEAST_TOKENS = 256  # of a stretch, where there are enough rows to keep a GPU busy
LEAST_OF_FEW = 64  # the same, of few rows
MANY_GROUPS = 512  # rows, times heads of keys: from here on copies are asynchronous
COPIED_BYTES = 8192  # of keys in such a copy, and as many of values


@triton.jit
def normed_heads(x, norm, i, partner, rotates, cos, sin, eps, HALF, NORM: tl.constexpr, D):
    """Heads behind x, a pointer or pointers [n, 1]: normed and rotated, float32 [D] or [n, D]."""
    own = tl.load(x + i).to(tl.float32)
    other = tl.load(x + partner).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, axis=-1, keep_dims=True) / D + eps)
        own = own * scale * tl.load(norm + i)
        other = other * scale * tl.load(norm + partner)
    turned = own * cos + tl.where(i < HALF, -other, other) * sin
    return tl.where(rotates, turned, own)


@triton.jit
def _begin(position, window, WINDOW: tl.constexpr):
    """Of the tokens that are seen the first one; what lies before it may be another row's."""
    begin = position * 0
    if WINDOW:
        begin = tl.maximum(position + 1 - window, 0)
    return begin


@triton.jit
def _stretch(num_seen, SPLITS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """Tokens of a row that one program takes."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, SPLITS), BLOCK) * BLOCK, LEAST)


@triton.jit
def _cells(cells_of, t, end, position, kv_stride):
    """Where tokens lie, and which of them were there before this one."""
    is_old = (t < end) & (t < position)
    return tl.load(cells_of + t, mask=is_old, other=0).to(tl.int64) * kv_stride, is_old


@triton.jit
def _block(here, values, cell, is_old, i):
    """Their keys and values."""
    block = here + cell[:, None] + i[None, :]
    k = tl.load(block, mask=is_old[:, None], other=0.0)
    return k, tl.load(block + values, mask=is_old[:, None], other=0.0)


@triton.jit
def _scores(q, k, is_old, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = capped(scores, softcap)
    return tl.where(is_old[None, :], scores, float("-inf"))


@triton.jit
def _attend(
    qkv,
    q_norm,
    k_norm,
    cos_table,
    sin_table,
    kv,
    table,
    slots,
    positions,
    cells,
    partial,
    tops,
    masses,
    row_stride,
    kv_stride,
    table_stride,
    eps,
    scale,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    if not EARLY:
        wait_for_previous(PDL)
    # Heads of one token lie side by side, and are read at about the same time.
    kv_head, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    per_kv: tl.constexpr = HEADS // KV_HEADS
    half: tl.constexpr = ROTATED // 2
    position = tl.load(positions + row)
    begin = _begin(position, window, WINDOW)
    stretch = _stretch(position + 1 - begin, SPLITS, BLOCK, LEAST)
    first = begin + split * stretch
    if first > position:
        return
    end = tl.minimum(first + stretch, position + 1)
    cells_of = table + tl.load(slots + row).to(tl.int64) * table_stride
    here = kv + kv_head * D
    values = KV_HEADS * D
    n, g, i = tl.arange(0, BLOCK), tl.arange(0, GROUP), tl.arange(0, D)
    if not COPIES:
        cell, is_old = _cells(cells_of, first + n, end, position, kv_stride)
        next_cell, next_old = _cells(cells_of, first + BLOCK + n, end, position, kv_stride)
        k, v = _block(here, values, cell, is_old, i)
    head = kv_head * per_kv + tl.minimum(g, per_kv - 1)
    at = (row * HEADS + head) * SPLITS + split
    rotates = i < ROTATED
    partner = tl.where(rotates, tl.where(i < half, i + half, i - half), i)
    turn = position.to(tl.int64) * half + tl.where(i < half, i, i - half)
    cos = tl.load(cos_table + turn, mask=rotates, other=1.0)
    sin = tl.load(sin_table + turn, mask=rotates, other=0.0)
    if EARLY:
        wait_for_previous(PDL)
    x = qkv + row.to(tl.int64) * row_stride
    keys = x + HEADS * D * (2 if GATED else 1) + kv_head * D
    q = normed_heads(
        x + head[:, None] * D, q_norm, i, partner, rotates, cos, sin, eps, half, NORM, D
    )
    q = (q * scale).to(kv.dtype.element_ty)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    found = tl.zeros([GROUP, D], tl.float32)
    if COPIES:
        for start in tl.range(first, end, BLOCK, num_stages=COPIES):
            cell, is_old = _cells(cells_of, start + n, end, position, kv_stride)
            k, v = _block(here, values, cell, is_old, i)
            scores = _scores(q, k, is_old, softcap, SOFTCAP, PRECISION)
            top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
    else:
        for start in tl.range(first, end, BLOCK, num_stages=1):
            # A block is on its way while the one before is computed, and where the next one lies.
            next_k, next_v = _block(here, values, next_cell, next_old, i)
            cell, later_old = _cells(cells_of, start + 2 * BLOCK + n, end, position, kv_stride)
            scores = _scores(q, k, is_old, softcap, SOFTCAP, PRECISION)
            top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
            k, v, is_old = next_k, next_v, next_old
            next_cell, next_old = cell, later_old
    if end == position + 1:  # the new token is in this stretch
        k_new = normed_heads(keys, k_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
        k_new = k_new.to(kv.dtype.element_ty)
        v_new = tl.load(keys + KV_HEADS * D + i)
        new = here + tl.load(cells + row).to(tl.int64) * kv_stride + i
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
    tl.store(tops + at, top, mask=g < per_kv)
    tl.store(masses + at, mass, mask=g < per_kv)
    tl.store(partial + at[:, None] * D + i[None, :], found, mask=(g < per_kv)[:, None])


@triton.jit
def _combine(
    qkv,
    partial,
    tops,
    masses,
    positions,
    out,
    row_stride,
    sinks,
    window,
    HEADS: tl.constexpr,
    GATED: tl.constexpr,
    D: tl.constexpr,
    SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    s, i = tl.arange(0, SPLITS), tl.arange(0, D)
    at = (row * HEADS + head) * SPLITS + s
    position = tl.load(positions + row)
    begin = _begin(position, window, WINDOW)
    stretch = _stretch(position + 1 - begin, SPLITS, BLOCK, LEAST)
    has_run = begin + s * stretch <= position
    top = tl.load(tops + at, mask=has_run, other=float("-inf"))
    highest = tl.max(top)
    if SINKS:
        sink = tl.load(sinks + head)
        highest = tl.maximum(highest, sink)
    weights = tl.exp(top - highest)
    mass = tl.sum(weights * tl.load(masses + at, mask=has_run, other=0.0))
    if SINKS:  # a key without a value
        mass += tl.exp(sink - highest)
    parts = tl.load(partial + at[:, None] * D + i[None, :], mask=has_run[:, None], other=0.0)
    y = tl.sum(parts * weights[:, None], axis=0) / mass
    if GATED:
        gate = tl.load(qkv + row.to(tl.int64) * row_stride + (HEADS + head) * D + i)
        y = y * tl.sigmoid(gate.to(tl.float32))
    tl.store(out + (row * HEADS + head) * D + i, y.to(out.dtype.element_ty))


def splits_for(num_groups: int) -> tuple[int, int]:
    """Stretches that a row can have at most, and the tokens of one at least.

    `num_groups`: rows, times heads of keys. A few rows share a GPU by short stretches; many fill it
    with one or two each, and only rows that are much longer have more.
    """
    wanted = min(MOST_SPLITS, max(OF_LONG_ROWS, AMPLE_PROGRAMS // num_groups))
    most = max(1, min(wanted, MOST_PROGRAMS // num_groups))
    are_few = num_groups * 4 <= PROGRAMS
    return 1 << (most.bit_length() - 1), LEAST_OF_FEW if are_few else LEAST_TOKENS


class StepTile(NamedTuple):
    block: int  # tokens
    num_warps: int
    copies: int  # stages of a pipeline of asynchronous copies; 0: a block ahead, in registers


def tile_for(dim: int, itemsize: int, num_groups: int) -> StepTile:
    if num_groups >= MANY_GROUPS:
        return StepTile(max(16, COPIED_BYTES // (dim * itemsize)), 4, 5)
    block = 64 if dim <= 64 else 32
    # What a thread keeps of a block in its registers, twice.
    return StepTile(block, max(2, block * dim * itemsize >> 12), 0)


def attention_step(
    qkv: torch.Tensor,  # [rows, ..]: queries | gates, if there are any | keys | values
    layer: AttentionLayer,
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool
    table: torch.Tensor,  # int32 [slots, positions]: the cells of tokens before this one
    inputs: Inputs,
    *,
    early: bool = False,
) -> torch.Tensor:
    """[rows, heads * channels], what the last product reads.

    `early`: inputs, and the cells before this token, were written before the step, so they may be
    read while the kernel before this one runs.
    """
    num_rows, heads, dim = qkv.shape[0], layer.shape.num_heads, layer.shape.head_dim
    num_groups = num_rows * layer.shape.num_kv_heads
    splits, least = splits_for(num_groups)
    tile = tile_for(dim, qkv.element_size(), num_groups)
    norms = layer.head_norms or (None, None)
    options = {"dtype": torch.float32, "device": qkv.device}
    sizes_of_parts = ((dim,), (), ())  # sums of values, largest scores, masses
    parts = [torch.empty(num_rows, heads, splits, *size, **options) for size in sizes_of_parts]
    out = torch.empty(num_rows, heads * dim, dtype=qkv.dtype, device=qkv.device)
    sizes = {"HEADS": heads, "GATED": layer.shape.gated, "D": dim}
    sizes |= {"SPLITS": splits, "BLOCK": tile.block, "LEAST": least}
    scoring = layer.scoring
    sizes["WINDOW"] = scoring.window > 0
    _attend[(layer.shape.num_kv_heads, num_rows, splits)](
        qkv,
        norms[0].weight if norms[0] else None,
        norms[1].weight if norms[1] else None,
        layer.rope.cos,
        layer.rope.sin,
        kv,
        table,
        inputs.slot,
        inputs.position,
        inputs.cell,
        *parts,
        qkv.stride(0),
        kv.stride(0),
        table.stride(0),
        norms[0].eps if norms[0] else 0.0,
        scoring.scale,
        scoring.softcap,
        scoring.window,
        **sizes,
        SOFTCAP=scoring.softcap > 0.0,
        KV_HEADS=layer.shape.num_kv_heads,
        NORM=norms[0] is not None,
        ROTATED=layer.rope.dim,
        GROUP=max(16, triton.next_power_of_2(heads // layer.shape.num_kv_heads)),
        PRECISION=precision_of(qkv.dtype),
        COPIES=tile.copies,
        EARLY=early,
        num_warps=tile.num_warps,
        **dependent(qkv.device),
    )
    _combine[(num_rows, heads)](
        qkv,
        *parts,
        inputs.position,
        out,
        qkv.stride(0),
        scoring.sinks,
        scoring.window,
        **sizes,
        SINKS=scoring.sinks is not None,
        num_warps=4,
        **dependent(qkv.device),
    )
    return out


LATENT_GROUP = 16  # heads of a program
LATENT_BLOCK = 32  # tokens
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
    num_parts = triton.cdiv(heads, LATENT_GROUP)
    splits, least = splits_for(num_rows * num_parts)
    splits = min(splits, max(1, MOST_SUMMED // rank))
    options = {"dtype": torch.float32, "device": q.device}
    parts = [torch.empty(num_rows, heads, splits, *size, **options) for size in ((rank,), (), ())]
    out = torch.empty(num_rows, heads, rank, dtype=q.dtype, device=q.device)
    sizes = {"HEADS": heads, "SPLITS": splits, "BLOCK": LATENT_BLOCK, "LEAST": least}
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
        GROUP=LATENT_GROUP,
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


@triton.jit
def _place_heads(
    qkv,
    q_norm,
    k_norm,
    cos_table,
    sin_table,
    queries,
    kv,
    positions,
    cells,
    row_stride,
    kv_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    D: tl.constexpr,
    ROTATED: tl.constexpr,
    FIRST: tl.constexpr,  # HEADS: none of the queries
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_for_previous(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) + FIRST
    half: tl.constexpr = ROTATED // 2
    position = tl.load(positions + row)
    i = tl.arange(0, D)
    rotates = i < ROTATED
    partner = tl.where(rotates, tl.where(i < half, i + half, i - half), i)
    turn = position.to(tl.int64) * half + tl.where(i < half, i, i - half)
    cos = tl.load(cos_table + turn, mask=rotates, other=1.0)
    sin = tl.load(sin_table + turn, mask=rotates, other=0.0)
    x = qkv + row * row_stride
    if FIRST < HEADS:  # noqa: SIM102 (one is known when it is compiled)
        if head < HEADS:
            q = normed_heads(
                x + head * D, q_norm, i, partner, rotates, cos, sin, eps, half, NORM, D
            )
            tl.store(queries + (row * HEADS + head) * D + i, q.to(queries.dtype.element_ty))
    if head >= HEADS:
        kv_head = head - HEADS
        keys = x + HEADS * D * (2 if GATED else 1) + kv_head * D
        k = normed_heads(keys, k_norm, i, partner, rotates, cos, sin, eps, half, NORM, D)
        v = tl.load(keys + KV_HEADS * D + i)
        new = kv + kv_head * D + tl.load(cells + row).to(tl.int64) * kv_stride + i
        tl.store(new, k.to(kv.dtype.element_ty))
        tl.store(new + KV_HEADS * D, v.to(kv.dtype.element_ty))


def place_heads(
    qkv: torch.Tensor,  # [tokens, ..]: queries | gates, if there are any | keys | values
    layer: AttentionLayer,
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool
    positions: torch.Tensor,  # integers [tokens]
    cells: torch.Tensor,
) -> torch.Tensor:
    """[tokens, heads, channels]: queries. Keys and values go into the cells."""
    shape = layer.shape
    queries = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.head_dim)
    _place(qkv, layer, kv, positions, cells, queries)
    return queries


def place_keys(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
) -> None:
    """Keys and values alone: of several tokens of a row, of which the later see the earlier, before
    `attention_step`, which writes each of them once more."""
    _place(qkv, layer, kv, positions, cells, None)


def _place(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    kv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    queries: torch.Tensor | None,
) -> None:
    shape, norms = layer.shape, layer.head_norms or (None, None)
    first = shape.num_heads if queries is None else 0
    _place_heads[(qkv.shape[0], shape.num_heads + shape.num_kv_heads - first)](
        qkv,
        norms[0].weight if norms[0] else None,
        norms[1].weight if norms[1] else None,
        layer.rope.cos,
        layer.rope.sin,
        queries,
        kv,
        positions,
        cells,
        qkv.stride(0),
        kv.stride(0),
        norms[0].eps if norms[0] else 0.0,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        GATED=shape.gated,
        NORM=norms[0] is not None,
        D=shape.head_dim,
        ROTATED=layer.rope.dim,
        FIRST=first,
        num_warps=1,
        **dependent(qkv.device),
    )
