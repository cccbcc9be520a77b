"""Products with packed weights: of a row, with what stands before and after it in a layer; of a few
rows; and whole weights unpacked, for cuBLAS and for embeddings.

    one row      as `kernels/products.py`, which see, and with its epilogues
    few rows     tensor cores on tiles that are unpacked in registers
    many rows    the weight is unpacked in parts
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import (
    allow_next,
    dependent,
    wait_for_previous,
)
from pippin.backends.torch.kernels.epilogues import (
    NO_EPILOGUE,
    SWIGLU,
    Epilogue,
    finish_sums,
    load_residual,
)
from pippin.backends.torch.kernels.packed.numbers import (
    arrays_of,
    constants_of,
    factor,
    number,
    weights_of,
)
from pippin.backends.torch.kernels.packed.sums import PackedTile, packed_sums, packed_tile_for
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.packed import AnyWeight, Packed, Stacked, times_dense
from pippin.backends.torch.models.parts import Linear, Norm
from pippin.backends.torch.step.decode_inputs import Inputs

_SWIGLU = tl.constexpr(SWIGLU)


@triton.jit
def _row_product(
    x,
    weight,
    bias,
    norm,
    residual,
    conv,
    out,
    num_out,
    K: tl.constexpr,
    eps,
    conv_stride,
    num_channels,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,
    TWO_AT_A_TIME: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    span: tl.constexpr = COLUMNS // 2 if EPILOGUE == _SWIGLU else COLUMNS
    n = tl.program_id(0) * span + tl.arange(0, span)
    found, squares = packed_sums(
        x + tl.zeros([1, 1, 1], tl.int32),
        norm,
        weight,
        (tl.program_id(0) * span).to(tl.int64),
        num_out - 1,
        num_out,
        K,
        KIND,
        GROUP,
        PER_WORD,
        OFFSET,
        TWO_AT_A_TIME,
        1,
        COLUMNS,
        span,
        NORM,
        WARPS,
        RUNS,
        PDL,
    )
    added = load_residual(residual, n, num_out, EPILOGUE)
    found = tl.reshape(found, [COLUMNS])
    sums, sums2 = found, found
    if EPILOGUE == _SWIGLU:
        sums, sums2 = tl.split(tl.permute(tl.reshape(found, [2, span]), [1, 0]))
    finish_sums(
        sums,
        sums2,
        tl.sum(squares, axis=0) / K,
        bias,
        added,
        conv,
        out,
        n,
        num_out,
        eps,
        conv_stride,
        num_channels,
        NORM,
        BIAS,
        EPILOGUE,
        TAPS,
        LINES,
    )


def row_product(
    x: torch.Tensor,  # [1, K]
    weight: Packed,  # [N, K]; [2 N, K] with swiglu
    bias: torch.Tensor | None,
    norm: Norm | None,
    epilogue: Epilogue,
    tile: PackedTile | None = None,
) -> torch.Tensor:
    """[1, N]"""
    assert len(x) == 1
    num_out = weight.shape[0] // (2 if epilogue.kind == SWIGLU else 1)
    tile = tile or packed_tile_for(1, weight.shape[0], weight.words.shape[-1], x.element_size())
    out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    span = tile.columns // (2 if epilogue.kind == SWIGLU else 1)
    _row_product[(triton.cdiv(num_out, span),)](
        x,
        arrays_of(weight),
        bias,
        norm.weight if norm else None,
        out=out,
        num_out=num_out,
        eps=norm.eps if norm else 0.0,
        **epilogue.arguments(),
        NORM=norm is not None,
        BIAS=bias is not None,
        **tile.arguments(x, weight),
    )
    return out


MOST_ROWS = 32  # more of them are worth a dense weight
LOOKED_UP = 256  # words of a program
UNPACKED = 4096  # numbers of a program


@triton.jit(do_not_specialize=["num_rows"])
def _few_rows(
    x,
    weight,
    bias,
    out,
    num_rows,
    N,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    TWO_AT_A_TIME: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    RUNS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    first_row = tl.program_id(0).to(tl.int64) * COLUMNS
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    sums, _ = packed_sums(
        x + tl.minimum(m, num_rows - 1)[None, :, None] * K,
        None,
        weight,
        first_row,
        N - 1,
        0,
        K,
        KIND,
        GROUP,
        PER_WORD,
        OFFSET,
        TWO_AT_A_TIME,
        ROWS,
        COLUMNS,
        COLUMNS,
        False,
        WARPS,
        RUNS,
        PDL,
    )
    n = first_row + tl.arange(0, COLUMNS)[:, None]
    if BIAS:
        sums += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    inside = (m < num_rows)[None, :] & (n < N)
    tl.store(out + m[None, :] * N + n, sums.to(out.dtype.element_ty), mask=inside)


def few_rows(
    x: torch.Tensor,  # [rows, K]
    weight: Packed,
    bias: torch.Tensor | None,
    tile: PackedTile | None = None,
) -> torch.Tensor:
    """[rows, N]"""
    num_rows, num_out = len(x), weight.shape[0]
    tile = tile or packed_tile_for(num_rows, num_out, weight.words.shape[-1], x.element_size())
    out = torch.empty(num_rows, num_out, dtype=x.dtype, device=x.device)
    _few_rows[triton.cdiv(num_out, tile.columns), triton.cdiv(num_rows, tile.rows)](
        x.contiguous(),
        arrays_of(weight),
        bias,
        out,
        num_rows,
        num_out,
        BIAS=bias is not None,
        ROWS=tile.rows,
        **tile.arguments(x, weight),
    )
    return out


@triton.jit
def _unpack_words(
    weight,
    row,
    out,  # of that row
    w,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
):
    per_group: tl.constexpr = GROUP // PER_WORD
    inside = w < K // PER_WORD
    words = tl.load(weight.words + row * (K // PER_WORD) + w, mask=inside, other=0)
    at = row * (K // GROUP) + w // per_group
    scale = factor(weight.scales, at, inside)
    if OFFSET:
        offset = tl.load(weight.offsets + at, mask=inside, other=0.0).to(tl.float32)
    channel = (w // per_group) * GROUP + w % per_group
    for part in tl.static_range(PER_WORD):
        found = number(words, part, KIND) * scale
        if OFFSET:
            found += offset
        tl.store(out + channel + part * per_group, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_groups"])
def _unpack(
    weight,
    out,
    num_groups,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Groups, which lie one behind the other in all rows. Stored in the order of channels."""
    per_group: tl.constexpr = GROUP // PER_WORD
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = (group < num_groups)[:, None]
    at = group[:, None] * per_group + tl.arange(0, per_group)[None, :]
    words = tl.load(weight.words + at, mask=inside, other=0)
    scale = factor(weight.scales, group[:, None], inside)
    offset = scale * 0.0
    if OFFSET:
        offset = tl.load(weight.offsets + group[:, None], mask=inside, other=0.0)
    found = weights_of(words, scale, offset, KIND, PER_WORD, out.dtype.element_ty, False)
    found = tl.reshape(found, [GROUPS, per_group, PER_WORD])
    found = tl.reshape(tl.permute(found, [0, 2, 1]), [GROUPS, GROUP])
    tl.store(out + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], found, mask=inside)


@triton.jit
def _look_up(
    weight,
    future,
    table,
    slots,
    positions,
    cells,
    out,
    stride,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    PER_WORD: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)  # and only then allow the next one: this is a step's first kernel
    allow_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    w = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(future + slot).to(tl.int64)
    _unpack_words(weight, token, out + row * K, w, K, KIND, GROUP, PER_WORD, OFFSET)
    tl.store(table + slot * stride + tl.load(positions + row), tl.load(cells + row))


def _grid(num_rows: int, num_words: int) -> tuple[tuple[int, int], dict[str, int]]:
    """And the constants that it is for."""
    block = min(LOOKED_UP, triton.next_power_of_2(num_words))
    constants = {"WORDS": block, "num_warps": max(1, min(4, block // 32))}
    return (num_rows, triton.cdiv(num_words, block)), constants


def dense_rows(weight: Packed) -> torch.Tensor:
    """As `models/packed.py: dense`."""
    num_groups, groups = weight.scales.numel(), UNPACKED // weight.group
    out = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    _unpack[(triton.cdiv(num_groups, groups),)](
        arrays_of(weight), out, num_groups, **constants_of(weight), GROUPS=groups, num_warps=4
    )
    return out


def look_up_packed(
    embed: Packed,
    future: torch.Tensor,  # int32 [slots]: the future map
    table: torch.Tensor,  # int32 [slots, positions]
    inputs: Inputs,
) -> torch.Tensor:
    """As `kernels/rows.py: look_up`."""
    rows, size = (inputs.slot, inputs.position, inputs.cell), embed.shape[1]
    out = torch.empty(len(rows[0]), size, dtype=embed.dtype, device=embed.device)
    grid, block = _grid(len(rows[0]), embed.words.shape[-1])
    _look_up[grid](
        arrays_of(embed),
        future,
        table,
        *rows,
        out,
        table.stride(0),
        K=size,
        **constants_of(embed),
        **block,
        **dependent(out.device),
    )
    return out


MOST_DENSE = 64 << 20  # weights that are unpacked at a time: 128 MB in half precision
Part = TypeVar("Part")


def packed_times(x: torch.Tensor, weight: AnyWeight, bias: torch.Tensor | None) -> torch.Tensor:
    if isinstance(weight, Stacked):
        y = torch.cat([packed_times(x, part, None) for part in weight.parts], dim=-1)
        return y if bias is None else y + bias
    if not isinstance(weight, Packed) or x.dim() != 2 or len(x) > MOST_ROWS:
        return times_dense(x, weight, bias, dense_rows, MOST_DENSE)
    if len(x) == 1:
        return row_product(x, weight, bias, None, NO_EPILOGUE)
    return few_rows(x, weight, bias)


def by_kernels(part: Part) -> Part:
    """The same part of a decoder, whose products with packed weights are kernels'."""

    def change(linear: Linear) -> Linear:
        dense = isinstance(linear.weight, torch.Tensor)
        return linear if dense else replace(linear, times=packed_times)

    made: Part = _map_linears(part, change)
    return made


def is_stacked(decoder: Decoder) -> bool:
    """Whether a product's rows are stored in different ways, which no one kernel reads."""
    return any(isinstance(linear.weight, Stacked) for linear in _linears(decoder))


def is_packed(decoder: Decoder) -> bool:
    """Whether a product has a packed weight."""
    return any(isinstance(linear.weight, Packed) for linear in _linears(decoder))


def _linears(decoder: Decoder) -> list[Linear]:
    found: list[Linear] = []

    def note(linear: Linear) -> Linear:
        found.append(linear)
        return linear

    _map_linears(decoder, note)
    return found


def _map_linears(part: Any, change: Callable[[Linear], Linear]) -> Any:
    """The part itself where nothing in it changes."""
    if isinstance(part, Linear):
        return change(part)
    if type(part) is tuple:
        made = tuple(_map_linears(each, change) for each in part)
        return part if all(map(operator.is_, made, part)) else made
    if not is_dataclass(part) or isinstance(part, (Packed, type)):
        return part
    old = {field.name: getattr(part, field.name) for field in fields(part)}
    new = {name: _map_linears(value, change) for name, value in old.items()}
    changed = {name: value for name, value in new.items() if value is not old[name]}
    return replace(part, **changed) if changed else part
