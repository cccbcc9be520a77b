"""Weights of a few bits, as they lie in memory, and products with them in plain operations.

    weight[n, k] = number[n, k] * scale[n, k // group] + offset[n, k // group]

Every packed format of a checkpoint becomes this one (`formats.py`), so that kernels read one. Knows
no checkpoints and no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812

from pippin.errors import LoadError

Numbers = Literal["int4", "int8", "fp4", "fp8"]
BITS: dict[Numbers, int] = {"int4": 4, "int8": 8, "fp4": 4, "fp8": 8}
GROUPS = (128, 64, 32)  # that kernels take; a longer one of a checkpoint is cut into them
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and their negatives
MOST_DENSE = 8 << 20  # weights that are unpacked at a time: 100 MB in plain operations


@dataclass(frozen=True)
class Packed:
    """Words of a group: part i of word w is number i * (words of the group) + w.

    So one part of neighbouring words is of neighbouring numbers, and a product reads what it
    multiplies them with in order.
    """

    words: torch.Tensor  # int32 [..., rows, numbers / numbers of a word]
    scales: torch.Tensor  # [..., rows, groups]; uint8: exponents of 2, plus 127
    offsets: torch.Tensor | None  # [..., rows, groups]
    numbers: Numbers
    group: int  # numbers of one scale
    dtype: torch.dtype  # that is served

    @property
    def shape(self) -> torch.Size:
        """Of the weight that it stands for."""
        size = self.words.shape[-1] * (32 // BITS[self.numbers])
        return torch.Size((*self.words.shape[:-1], size))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def device(self) -> torch.device:
        return self.words.device

    def _tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.words, self.scales, self.offsets) if t is not None]

    def __getitem__(self, rows: int | slice | torch.Tensor) -> Packed:
        """Rows, or of experts one."""
        return join([self], lambda each: each[0][rows].contiguous())


Dense = Callable[[Packed], torch.Tensor]


@dataclass(frozen=True)
class Stacked:
    """Weights of one input that are stored in different ways, one below the other."""

    parts: tuple[torch.Tensor | Packed, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device


Weight: TypeAlias = torch.Tensor | Packed
AnyWeight: TypeAlias = Weight | Stacked


def pack(
    codes: torch.Tensor,  # uint8 [..., rows, numbers]: the bits of each number
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    numbers: Numbers,
    dtype: torch.dtype,
) -> Packed:
    stored = codes.shape[-1] // scales.shape[-1]
    group = next((size for size in GROUPS if stored % size == 0), None)
    if group is None or stored * scales.shape[-1] != codes.shape[-1]:
        raise LoadError(
            f"a packed weight has {codes.shape[-1]} numbers and {scales.shape[-1]} scales in a row:"
            f" the torch backend serves groups of a multiple of {GROUPS[-1]}"
        )
    if stored > group:
        scales = scales.repeat_interleave(stored // group, dim=-1)
        offsets = None if offsets is None else offsets.repeat_interleave(stored // group, dim=-1)
    bits = BITS[numbers]
    grouped = codes.unflatten(-1, (-1, 32 // bits, group * bits // 32))
    words = torch.zeros_like(grouped[..., 0, :], dtype=torch.int32)
    for part in range(32 // bits):
        words |= grouped[..., part, :].to(torch.int32) << (part * bits)
    words = words.flatten(-2)
    return Packed(words, scales.contiguous(), offsets, numbers, group, dtype)


def unpack(weight: Packed) -> torch.Tensor:
    """uint8 [..., rows, numbers]"""
    bits = BITS[weight.numbers]
    words = weight.words.unflatten(-1, (-1, weight.group * bits // 32))
    parts = [(words >> (part * bits)) & ((1 << bits) - 1) for part in range(32 // bits)]
    return torch.stack(parts, dim=-2).to(torch.uint8).flatten(-3)


def dense(weight: Packed) -> torch.Tensor:
    codes = unpack(weight)
    if weight.numbers == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
    elif weight.numbers == "fp4":
        table = torch.tensor(FP4_VALUES, device=codes.device)
        values = torch.cat([table, -table])[codes.int()]
    else:
        values = codes.float()
    values = values.unflatten(-1, (-1, weight.group)).mul_(_factors(weight.scales)[..., None])
    if weight.offsets is not None:
        values += weight.offsets.float()[..., None]
    return values.flatten(-2).to(weight.dtype)


def _factors(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.float() - 127.0)
    return scales.float()


def times(x: torch.Tensor, weight: AnyWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias"""
    return times_dense(x, weight, bias, dense, MOST_DENSE)


def times_dense(
    x: torch.Tensor, weight: AnyWeight, bias: torch.Tensor | None, dense: Dense, most: int
) -> torch.Tensor:
    """By `dense`, never of more than `most` weights at a time."""
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight, bias)
    if isinstance(weight, Stacked):
        y = torch.cat([times_dense(x, part, None, dense, most) for part in weight.parts], dim=-1)
        return y if bias is None else y + bias
    num_rows, size = weight.shape
    if num_rows * size <= most:
        return F.linear(x, dense(weight), bias)
    y = x.new_empty(*x.shape[:-1], num_rows)
    step = max(1, most // size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        y[..., rows] = F.linear(x, dense(weight[rows]), None if bias is None else bias[rows])
    return y


def embed_rows(weight: Weight, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding."""
    return (
        F.embedding(tokens, weight) if isinstance(weight, torch.Tensor) else dense(weight[tokens])
    )


def join(weights: Sequence[Packed], how: Callable[[list[torch.Tensor]], torch.Tensor]) -> Packed:
    """Of weights that are packed in the same way."""
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return replace(
        weights[0],
        words=how([weight.words for weight in weights]),
        scales=how([weight.scales for weight in weights]),
        offsets=how(offsets) if offsets else None,
    )


def are_alike(weights: Sequence[Weight]) -> bool:
    """Whether they can be one: dense, or packed in the same way."""

    def form(weight: Weight) -> object:
        if isinstance(weight, torch.Tensor):
            return None
        kinds = None if weight.offsets is None else weight.offsets.dtype
        return weight.numbers, weight.group, weight.scales.dtype, kinds

    return len({form(weight) for weight in weights}) == 1


def cat(weights: Sequence[Weight], dim: int = 0) -> AnyWeight:
    """Rows of several, one below the other. `dim`: 1 of experts."""
    if len(weights) == 1:
        return weights[0]
    if not are_alike(weights):
        return Stacked(tuple(weights))
    return combine(weights, lambda tensors: torch.cat(tensors, dim=dim))


def combine(weights: Sequence[Weight], how: Callable[[list[torch.Tensor]], torch.Tensor]) -> Weight:
    """Of weights that are alike."""
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if packed:
        return join(packed, how)
    return how([weight for weight in weights if isinstance(weight, torch.Tensor)])
