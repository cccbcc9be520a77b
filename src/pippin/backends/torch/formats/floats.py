"""Packed floats: FP8 with scales of blocks, MXFP4 as gpt-oss stores it. Knows no config.json."""

from __future__ import annotations

import torch

from pippin.backends.torch.models.packed import GROUPS, Packed, pack
from pippin.errors import LoadError


def read_fp8(
    weight: torch.Tensor,  # float8_e4m3fn [rows, n]
    scales: torch.Tensor,  # of blocks [rows / height, n / width], of rows [rows, 1], or one
    block: tuple[int, int] | None,  # height and width; None: as many as there are scales
    dtype: torch.dtype,
    name: str,
) -> Packed:
    """One scale for each group of a row: blocks' are repeated, 3% of the weight at 128."""
    if weight.dtype != torch.float8_e4m3fn:
        raise LoadError(
            f"{name} is stored as {weight.dtype}: of FP8 weights float8_e4m3fn is served"
        )
    num_rows, size = weight.shape
    scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
    height, width = block or (-(-num_rows // scales.shape[0]), size // scales.shape[1])
    group = next((g for g in GROUPS if size % g == 0 and width % g == 0), None)
    if group is None:
        raise LoadError(
            f"{name} has rows of {size} numbers in blocks of {width}: multiples of {GROUPS[-1]} are"
            " served"
        )
    by_row = scales.repeat_interleave(height, dim=0)[:num_rows]
    by_group = by_row.repeat_interleave(width // group, dim=1)[:, : size // group]
    return pack(weight.view(torch.uint8), by_group, None, "fp8", dtype)


def read_mxfp4(
    blocks: torch.Tensor,  # uint8 [..., rows, groups, 16]: two numbers each, the lower bits first
    scales: torch.Tensor,  # uint8 [..., rows, groups]: exponents of 2, plus 127
    dtype: torch.dtype,
) -> Packed:
    codes = torch.stack([blocks & 0xF, blocks >> 4], dim=-1).flatten(-3)
    return pack(codes, scales, None, "fp4", dtype)
