"""A row times a large packed weight, and what stands before and after it in a layer.

As `kernels/products.py`, which see, and with its epilogues; the sums are those of `sums.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pippin.backends.torch.kernels.dependent import allow_next
from pippin.backends.torch.kernels.epilogues import SWIGLU, Epilogue, finish_sums, load_residual
from pippin.backends.torch.kernels.packed.numbers import arrays_of
from pippin.backends.torch.kernels.packed.sums import PackedTile, packed_sums, packed_tile_for
from pippin.backends.torch.models.packed import Packed
from pippin.backends.torch.models.parts import Norm

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
