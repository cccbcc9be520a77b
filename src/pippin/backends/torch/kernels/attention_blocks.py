"""Attention of prompts' chunks over cells: blocks of GRID tokens, each of one row.

A program takes some tokens of a block for one query head, and goes through all tokens that they
see by the table of cells: those of the chunk itself have been written before. Lengths and positions
are looked up, so a captured graph serves chunks of any lengths behind prefixes of any lengths;
blocks without tokens see nothing and write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.products import precision_of
from pippin.backends.torch.models.attention_layer import Scoring
from pippin.backends.torch.step.chunk_inputs import BlockInputs
from pippin.types import GRID

TILE_BYTES = 1 << 15  # of queries, and of the keys or values that are read at a time, at most


@dataclass(frozen=True)
class AttentionTile:
    num_queries: int
    num_keys: int
    num_warps: int


def attention_tile_for(dim: int, itemsize: int) -> AttentionTile:
    """What fits into the shared memory of every GPU since Ampere, with two stages of keys."""
    most, most_in_registers = TILE_BYTES // (dim * itemsize), 2 * GRID // itemsize
    num_queries = max(16, min(most_in_registers, most))
    num_keys = max(16, min(most_in_registers, most // 2))
    return AttentionTile(num_queries, num_keys, 8 if num_queries * dim > 8192 else 4)


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
def _attend_blocks(
    q,
    kv,
    table,
    blocks,
    out,
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
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = head // (HEADS // KV_HEADS)
    length = tl.load(blocks.length + block)
    position = tl.load(blocks.position + block)
    first = part * QUERIES
    n, i = first + tl.arange(0, QUERIES), tl.arange(0, D)
    inside = n < length
    token = tl.load(blocks.start + block).to(tl.int64) + n
    q_at = token[:, None] * token_stride + head * head_stride + i[None, :]
    queries = tl.load(q + q_at, mask=inside[:, None], other=0.0)
    top = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    if SINKS:  # as a first key, without a value
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sinks + head)
        mass += 1.0
    found = tl.zeros([QUERIES, D], tl.float32)
    cells_of = table + tl.load(blocks.slot + block).to(tl.int64) * table_stride
    here = kv + kv_head * D
    end = tl.where(first < length, position + tl.minimum(first + QUERIES, length), 0)
    begin = 0
    if WINDOW:  # what lies before it may be another row's by now
        begin = tl.maximum(position + first - window + 1, 0)
    for start in range(begin, end, KEYS):
        t = start + tl.arange(0, KEYS)
        is_held = t < end
        cell = tl.load(cells_of + t, mask=is_held, other=0).to(tl.int64) * kv_stride
        at = here + cell[:, None] + i[None, :]
        k = tl.load(at, mask=is_held[:, None], other=0.0)
        v = tl.load(at + KV_HEADS * D, mask=is_held[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scores = capped(scores, softcap)
        sees = is_held[None, :] & (t[None, :] <= position + n[:, None])
        if WINDOW:
            sees = sees & (t[None, :] > position + n[:, None] - window)
        scores = tl.where(sees, scores, float("-inf"))
        top, mass, found = add_values(scores, v, top, mass, found, PRECISION)
    y = found / tl.where(mass > 0.0, mass, 1.0)[:, None]
    y_at = (token[:, None] * HEADS + head) * D + i[None, :]
    tl.store(out + y_at, y.to(out.dtype.element_ty), mask=inside[:, None])


def attend_blocks(
    q: torch.Tensor,  # [tokens, heads, channels], a head's channels side by side
    kv: torch.Tensor,  # [cells, 2, kv heads, channels], a view of the pool
    table: torch.Tensor,  # int32 [slots, positions]: the cells of all tokens, the new ones too
    blocks: BlockInputs,
    scoring: Scoring,
    tile: AttentionTile | None = None,
) -> torch.Tensor:
    """[tokens, heads, channels]: zeros for tokens of no block."""
    tokens, heads, dim = q.shape
    assert q.stride(2) == 1
    num_kv_heads = kv.shape[2]
    tile = tile or attention_tile_for(dim, q.element_size())
    out = torch.zeros(tokens, heads, dim, dtype=q.dtype, device=q.device)
    _attend_blocks[(blocks.slot.shape[0], heads, GRID // tile.num_queries)](
        q,
        kv,
        table,
        blocks,
        out,
        q.stride(0),
        q.stride(1),
        kv.stride(0),
        table.stride(0),
        scoring.scale,
        scoring.sinks,
        scoring.softcap,
        scoring.window,
        HEADS=heads,
        KV_HEADS=num_kv_heads,
        D=dim,
        SINKS=scoring.sinks is not None,
        SOFTCAP=scoring.softcap > 0.0,
        WINDOW=scoring.window > 0,
        QUERIES=tile.num_queries,
        KEYS=tile.num_keys,
        PRECISION=precision_of(q.dtype),
        num_warps=tile.num_warps,
        num_stages=2,
    )
    return out
