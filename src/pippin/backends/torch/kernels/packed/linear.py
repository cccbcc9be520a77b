"""Which kernel multiplies with a weight, by how it is stored and by how many rows there are."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from pippin.backends.torch.kernels.epilogues import NO_EPILOGUE
from pippin.backends.torch.kernels.packed.products import row_product
from pippin.backends.torch.kernels.packed.rows import MOST_ROWS, dense_rows, few_rows
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.packed import AnyWeight, Packed, Stacked, times_dense
from pippin.backends.torch.models.parts import Linear

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
