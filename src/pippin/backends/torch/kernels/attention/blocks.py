"""Attention of prompts' chunks over cells: blocks of GRID tokens, each of one row.

Two kernels. A program of the first takes some tokens of a block for a few query heads that share a
key head, and a stretch of the tokens that they see, by the table of cells: those of the chunk
itself have been written before. Where a block sees little there is one stretch, whose program
writes the result; else the second kernel adds the stretches up. Lengths and positions are looked
up, so a captured graph serves chunks of any lengths behind prefixes of any lengths; blocks without
tokens see nothing and write nothing.

A cell has keys and values side by side; or, of latent attention, one key of all heads, whose first
channels are its value too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.mixers import Scoring
from pippin.backends.torch.step.words import BlockInputs
from pippin.types import GRID

TILE_BYTES = 1 << 15  # of queries, and of the keys or values that are read at a time, at most
MUCH_SHARED = 200 << 10  # of shared memory: GPUs since Hopper take twice as much
PROGRAMS = 528  # of the first kernel, where blocks see much: four for each processor of a large GPU
MOST_SPLITS = 32  # of a block
LEAST_TOKENS = 1024  # of a stretch
HEADS_TOGETHER = 4  # of latent attention, whose heads share their keys


@dataclass(frozen=True)
class AttentionTile:
    num_tokens: int  # of a block
    num_keys: int
    num_warps: int
    num_heads: int = 1  # query heads of one program
    num_stages: int = 2


def attention_tile_for(
    dim: int, itemsize: int, heads_of_a_key: int = 1, shared_bytes: int = 0
) -> AttentionTile:
    """What fits into the shared memory of every GPU since Ampere, with two stages of keys; or into
    `shared_bytes`, where that is more."""
    if itemsize == 2 and shared_bytes >= MUCH_SHARED:
        together = 2 if heads_of_a_key % 2 == 0 else 1
        num_keys, num_stages = (GRID, 2) if dim <= 128 else (GRID // 2, 3)
        return AttentionTile(GRID, num_keys, 4 * together, together, num_stages)
    most, most_in_registers = TILE_BYTES // (dim * itemsize), 2 * GRID // itemsize
    num_tokens = max(16, min(most_in_registers, most))
    num_keys = max(16, min(most_in_registers, most // 2))
    return AttentionTile(num_tokens, num_keys, 8 if num_tokens * dim > 8192 else 4)


def latent_tile_for(heads: int, itemsize: int, shared_bytes: int = 0) -> AttentionTile:
    """The same, of cells of up to 576 channels that all heads share: a token of several heads is
    several rows of a program, which hold their sums in registers."""
    together = math.gcd(heads, HEADS_TOGETHER)
    if itemsize == 2 and shared_bytes >= MUCH_SHARED:
        return AttentionTile(GRID // together, GRID, 8, together, num_stages=3)
    num_keys, num_stages = (32, 2) if itemsize == 2 else (16, 1)
    return AttentionTile(16 // together, num_keys, 8, together, num_stages)


def splits_for(num_programs: int) -> int:
    """Stretches that a block can have at most: few blocks share a GPU by many."""
    most = max(1, min(MOST_SPLITS, PROGRAMS // num_programs))
    return 1 << (most.bit_length() - 1)


@cache
def shared_bytes_of(device: torch.device) -> int:
    """Of a program, at most."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


SUMMED = 16  # tokens of a program of the second kernel
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, softcap):
    """softcap * tanh(scores / softcap)"""
    return softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)


@triton.jit
def add_values(scores, v, top, mass, found, PRECISION: tl.constexpr):
    """Continues a softmax over more keys: its largest score, its mass, the sum of values."""
    highest = tl.maximum(top, tl.max(scores, axis=1))
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(scores - safe[:, None])
    shrink = tl.exp(top - safe)
    mass = mass * shrink + tl.sum(weights, axis=1)
    found *= shrink[:, None]
    found = tl.dot(weights.to(v.dtype), v, found, input_precision=PRECISION)
    return highest, mass, found


@triton.jit
def _seen(blocks, block, first, window, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """What tokens from `first` on of a block see: from where to where. Nothing if there are none.

    What lies before a window may be another row's by now.
    """
    length, position = tl.load(blocks.length + block), tl.load(blocks.position + block)
    begin = 0
    if WINDOW:
        begin = tl.maximum(position + first - window + 1, 0)
    end = position + tl.minimum(first + TOKENS, length)
    return begin, tl.where(first < length, end, begin)


@triton.jit
def _stretch(num_seen, SPLITS: tl.constexpr, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Tokens that one program goes through."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_seen, SPLITS), KEYS) * KEYS, LEAST)


@triton.jit
def _in_log2(scores, scale, softcap, SOFTCAP: tl.constexpr):
    """Scaled and capped, of products; exponents of 2."""
    if SOFTCAP:
        scores = capped(scores * scale, softcap) / scale
    return scores * (scale * _LOG2E)


@triton.jit
def _scored(
    queries,
    turned,
    cell,
    is_held,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    VALUES: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of queries and the keys of cells, and their values."""
    i = tl.arange(0, D)
    mask = is_held[:, None] if MASKED else None
    other = 0.0 if MASKED else None
    k = tl.load(cell[:, None] + i[None, :], mask=mask, other=other)
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    if TURNED:
        v = k
        j = D + tl.arange(0, TURNED)
        k = tl.load(cell[:, None] + j[None, :], mask=mask, other=other)
        scores = tl.dot(turned, tl.trans(k), scores, input_precision=PRECISION)
    else:
        v = tl.load(cell[:, None] + (VALUES + i)[None, :], mask=mask, other=other)
    return scores, v


@triton.jit
def _attend_blocks(
    q,
    kv,
    table,
    blocks,
    out,
    partial,
    tops,
    masses,
    token_stride,
    head_stride,
    kv_stride,
    table_stride,
    scale,
    sinks,
    softcap,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    TURNED: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    TOGETHER: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, group = tl.program_id(0), tl.program_id(1)
    part, split = tl.program_id(2) % PARTS, tl.program_id(2) // PARTS
    first = part * TOKENS
    seen, end = _seen(blocks, block, first, window, TOKENS, WINDOW)
    stretch = _stretch(end - seen, SPLITS, KEYS, LEAST)
    begin = seen + split * stretch
    if begin >= end:
        return
    stop = tl.minimum(begin + stretch, end)
    length = tl.load(blocks.length + block)
    position = tl.load(blocks.position + block)
    row, i = tl.arange(0, TOKENS * TOGETHER), tl.arange(0, D)
    n, head = first + row % TOKENS, group * TOGETHER + row // TOKENS
    inside = n < length
    token = tl.load(blocks.start + block).to(tl.int64) + n
    q_at = q + (token * token_stride + head * head_stride)[:, None]
    queries = tl.load(q_at + i[None, :], mask=inside[:, None], other=0.0)
    turned = queries
    if TURNED:  # the queries' channels that meet no value
        j = D + tl.arange(0, TURNED)
        turned = tl.load(q_at + j[None, :], mask=inside[:, None], other=0.0)
    top = tl.full([TOKENS * TOGETHER], float("-inf"), tl.float32)
    mass = tl.zeros([TOKENS * TOGETHER], tl.float32)
    if SINKS:  # as a first key of the first stretch, without a value
        its = tl.load(sinks + head).to(tl.float32) * _LOG2E
        top = tl.where(split == 0, its, top)
        mass = tl.where(split == 0, 1.0, mass)
    found = tl.zeros([TOKENS * TOGETHER, D], tl.float32)
    cells_of = table + tl.load(blocks.slot + block).to(tl.int64) * table_stride
    here = kv + (group * TOGETHER // (HEADS // KV_HEADS)) * D
    # What all of the tokens see, then the rest. Sums of latents leave registers for one loop.
    whole = begin + tl.maximum(tl.minimum(stop, position + first + 1) - begin, 0) // KEYS * KEYS
    if WINDOW or TURNED:
        whole = begin
    if TURNED == 0:
        for start in range(begin, whole, KEYS):
            cell = here + tl.load(cells_of + start + tl.arange(0, KEYS)).to(tl.int64) * kv_stride
            scores, v = _scored(queries, turned, cell, None, D, 0, KV_HEADS * D, False, PRECISION)
            scores = _in_log2(scores, scale, softcap, SOFTCAP)
            highest = tl.maximum(top, tl.max(scores, axis=1))
            weights = tl.exp2(scores - highest[:, None])
            shrink = tl.exp2(top - highest)
            mass = mass * shrink + tl.sum(weights, axis=1)
            found = found * shrink[:, None]
            found = tl.dot(weights.to(v.dtype), v, found, input_precision=PRECISION)
            top = highest
    keys = tl.arange(0, KEYS)
    for start in range(whole, stop, KEYS):
        t = start + keys
        is_held = t < stop
        cell = here + tl.load(cells_of + t, mask=is_held, other=0).to(tl.int64) * kv_stride
        # Latents need no mask: cell 0 is one of zeros.
        scores, v = _scored(
            queries, turned, cell, is_held, D, TURNED, KV_HEADS * D, TURNED == 0, PRECISION
        )
        scores = _in_log2(scores, scale, softcap, SOFTCAP)
        last = tl.minimum(position + n, stop - 1) - start
        sees = keys[None, :] <= last[:, None]
        if WINDOW:
            sees = sees & (keys[None, :] > (position + n - window - start)[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(weights, axis=1)
        found = found * shrink[:, None]
        found = tl.dot(weights.to(v.dtype), v, found, input_precision=PRECISION)
        top = highest
    if TURNED:  # looked up again: the sums leave no registers for it until here
        length = tl.load(blocks.length + block, volatile=True)
        inside = n < length
        token = tl.load(blocks.start + block, volatile=True).to(tl.int64) + n
    line = token * HEADS + head
    if stretch >= end - seen:
        y = found / tl.where(mass > 0.0, mass, 1.0)[:, None]
        tl.store(out + line[:, None] * D + i[None, :], y.to(out.dtype.element_ty), inside[:, None])
    else:
        at = line * SPLITS + split
        tl.store(tops + at, top, mask=inside)
        tl.store(masses + at, mass, mask=inside)
        tl.store(partial + at[:, None] * D + i[None, :], found, mask=inside[:, None])


@triton.jit
def _sum_stretches(
    blocks,
    out,
    partial,
    tops,
    masses,
    window,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SUMMED: tl.constexpr,
):
    block, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tile * SUMMED // TOKENS * TOKENS
    seen, end = _seen(blocks, block, first, window, TOKENS, WINDOW)
    stretch = _stretch(end - seen, SPLITS, KEYS, LEAST)
    if stretch >= end - seen:
        return
    n, i = tile * SUMMED + tl.arange(0, SUMMED), tl.arange(0, D)
    inside = n < tl.load(blocks.length + block)
    line = (tl.load(blocks.start + block).to(tl.int64) + n) * HEADS + head
    top = tl.full([SUMMED], float("-inf"), tl.float32)
    mass = tl.zeros([SUMMED], tl.float32)
    found = tl.zeros([SUMMED, D], tl.float32)
    for split in range(tl.cdiv(end - seen, stretch)):
        at = line * SPLITS + split
        its_top = tl.load(tops + at, mask=inside, other=float("-inf"))
        highest = tl.maximum(top, its_top)
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, share = tl.exp2(top - safe), tl.exp2(its_top - safe)
        mass = mass * shrink + tl.load(masses + at, mask=inside, other=0.0) * share
        values = tl.load(partial + at[:, None] * D + i[None, :], mask=inside[:, None], other=0.0)
        found = found * shrink[:, None] + values * share[:, None]
        top = highest
    y = found / tl.where(mass > 0.0, mass, 1.0)[:, None]
    tl.store(out + line[:, None] * D + i[None, :], y.to(out.dtype.element_ty), mask=inside[:, None])


def attend_blocks(
    q: torch.Tensor,  # [tokens, heads, channels], a head's channels side by side
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool; or [cells, channels]
    table: torch.Tensor,  # int32 [slots, positions]: the cells of all tokens, the new ones too
    blocks: BlockInputs,
    scoring: Scoring,
    rank: int = 0,  # of latent attention: channels of a cell that are its value
    tile: AttentionTile | None = None,
    splits: int | None = None,
    least: int = LEAST_TOKENS,
) -> torch.Tensor:
    """[tokens, heads, channels of a value]: zeros for tokens of no block."""
    tokens, heads, key_dim = q.shape
    dim, turned = (rank, key_dim - rank) if rank else (key_dim, 0)
    assert q.stride(2) == 1
    num_blocks, num_kv_heads = blocks.slot.shape[0], 1 if rank else kv.shape[2]
    if tile is None:
        itemsize, shared = q.element_size(), shared_bytes_of(q.device)
        per_key = heads // num_kv_heads
        tile = (
            latent_tile_for(heads, itemsize, shared)
            if rank
            else attention_tile_for(dim, itemsize, per_key, shared)
        )
    parts, groups = GRID // tile.num_tokens, heads // tile.num_heads
    splits = splits or splits_for(num_blocks * groups * parts)
    out = torch.zeros(tokens, heads, dim, dtype=q.dtype, device=q.device)
    sizes_of_parts = ((dim,), (), ())  # sums of values, largest scores, masses
    options = {"dtype": torch.float32, "device": q.device}
    lines = (tokens, heads, splits) if splits > 1 else (1, 1, 1)
    found = [torch.empty(*lines, *size, **options) for size in sizes_of_parts]
    sizes = {"HEADS": heads, "D": dim, "TOKENS": tile.num_tokens, "KEYS": tile.num_keys}
    sizes |= {"SPLITS": splits, "LEAST": least if splits > 1 else 1 << 30}
    sizes["WINDOW"] = scoring.window > 0
    _attend_blocks[(num_blocks, groups, parts * splits)](
        q,
        kv,
        table,
        blocks,
        out,
        *found,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        table.stride(0),
        scoring.scale,
        scoring.sinks,
        scoring.softcap,
        scoring.window,
        **sizes,
        SINKS=scoring.sinks is not None,
        SOFTCAP=scoring.softcap > 0.0,
        KV_HEADS=num_kv_heads,
        TURNED=turned,
        TOGETHER=tile.num_heads,
        PARTS=parts,
        PRECISION=precision_of(q.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        summed = min(SUMMED, tile.num_tokens)
        _sum_stretches[(num_blocks, heads, GRID // summed)](
            blocks, out, *found, scoring.window, **sizes, SUMMED=summed, num_warps=4
        )
    return out
