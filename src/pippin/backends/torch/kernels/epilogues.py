"""What is done with the sums of one row's product before they are stored. Computes no products.

The sums are still in registers: the norm's division, a bias, and one of: the residual sum, the
gated product of a feed-forward layer, the convolution of a recurrent one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

PLAIN, RESIDUAL, SWIGLU, CONV = range(4)
_RESIDUAL, _SWIGLU, _CONV = (tl.constexpr(i) for i in (RESIDUAL, SWIGLU, CONV))


@dataclass(frozen=True)
class Tile:
    """Of a product: rows of the weight, and channels, which are all there are or more."""

    block_n: int
    block_k: int
    num_warps: int


class ConvStep(NamedTuple):
    """Where the last inputs of a recurrent layer's channels lie."""

    inputs: torch.Tensor  # [slabs, taps - 1, channels], a view of the pool
    taps: torch.Tensor  # [taps, channels]
    state_in: torch.Tensor  # int32 [1]
    state_out: torch.Tensor


@dataclass(frozen=True)
class Epilogue:
    kind: int = PLAIN
    residual: torch.Tensor | None = None  # [1, N]
    conv: ConvStep | None = None

    @classmethod
    def of(cls, residual: torch.Tensor | None, swiglu: bool, conv: ConvStep | None) -> Epilogue:
        kind = RESIDUAL if residual is not None else SWIGLU if swiglu else CONV if conv else PLAIN
        return cls(kind, residual, conv)

    def arguments(self) -> dict[str, Any]:
        """Of a kernel, by name."""
        conv, num_taps = self.conv, 0 if self.conv is None else self.conv.taps.shape[0]
        return {
            "residual": self.residual,
            "conv": conv,
            "conv_stride": conv.inputs.stride(0) if conv else 0,
            "num_channels": conv.inputs.shape[2] if conv else 0,
            "EPILOGUE": self.kind,
            "TAPS": num_taps,
            "LINES": triton.next_power_of_2(num_taps - 1) if conv else 0,
        }


NO_EPILOGUE = Epilogue()


@triton.jit
def load_residual(residual, n, num_out, EPILOGUE: tl.constexpr):
    """What `finish_sums` adds: it arrives while the sums are made."""
    found = n * 0.0
    if EPILOGUE == _RESIDUAL:
        found = tl.load(residual + n, mask=n < num_out, other=0.0).to(tl.float32)
    return found


@triton.jit
def finish_sums(
    sums,
    sums2,  # with SWIGLU: of the rows behind the first num_out
    mean_square,  # of x, with NORM
    bias,
    added,  # with RESIDUAL
    conv,
    out,
    n,
    num_out,
    eps,
    conv_stride,
    num_channels,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr,
    TAPS: tl.constexpr,
    LINES: tl.constexpr,  # TAPS - 1, up to a power of two
):
    in_n = n < num_out
    if NORM:
        scale = tl.rsqrt(mean_square + eps)
        sums *= scale
        sums2 *= scale
    if BIAS:
        sums += tl.load(bias + n, mask=in_n, other=0.0).to(tl.float32)
        if EPILOGUE == _SWIGLU:
            sums2 += tl.load(bias + num_out + n, mask=in_n, other=0.0).to(tl.float32)
    if EPILOGUE == _RESIDUAL:
        sums += added
    if EPILOGUE == _SWIGLU:
        sums = sums * tl.sigmoid(sums) * sums2
    if EPILOGUE == _CONV:
        before = conv.inputs + tl.load(conv.state_in).to(tl.int64) * conv_stride
        after = conv.inputs + tl.load(conv.state_out).to(tl.int64) * conv_stride
        sums = _convolve(sums, before, after, conv.taps, n, num_channels, TAPS, LINES)
    tl.store(out + n, sums.to(out.dtype.element_ty), mask=in_n)


@triton.jit
def _convolve(sums, before, after, taps, n, num_channels, TAPS: tl.constexpr, LINES: tl.constexpr):
    """Of channels: the causal convolution with the last inputs, its silu; the inputs move on.

    A channel belongs to one program alone, but old and new inputs may lie in the same place, and
    in so small a block one warp computes with a channel while another one stores it. So all of the
    old inputs are read before any warp writes.
    """
    is_channel = n < num_channels
    newest = sums.to(before.dtype.element_ty)
    weight = tl.load(taps + (TAPS - 1) * num_channels + n, mask=is_channel, other=0.0)
    found = newest.to(tl.float32) * weight.to(tl.float32)
    tap = tl.arange(0, LINES)[:, None]
    at = tap * num_channels + n[None, :]
    is_old = (tap < TAPS - 1) & is_channel[None, :]
    old = tl.load(before + at, mask=is_old, other=0.0)
    weights = tl.load(taps + at, mask=is_old, other=0.0)
    found += tl.sum(old.to(tl.float32) * weights.to(tl.float32), axis=0)
    tl.debug_barrier()
    tl.store(after + at - num_channels, old, mask=is_old & (tap > 0))
    tl.store(after + (TAPS - 2) * num_channels + n, newest, mask=is_channel)
    return tl.where(is_channel, found * tl.sigmoid(found), sums)
