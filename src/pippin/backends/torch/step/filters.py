"""What top_k, top_p and min_p take out of rows of scaled logits. Draws no tokens, knows no slots.

The rules are those of `sampling/rules.py`: thresholds on masses counted in whole units, so that
neither the order of a sort nor that of a sum matters. top_p without top_k has two forms that keep
the same tokens: a sort, and on GPUs one without (`kernels/top_p.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pippin.backends.sampling.rules import MASS_UNITS, SHORT, Draw
from pippin.backends.torch.step.decode_inputs import Inputs

_OFF = 2.0  # a top_p that no sum of masses reaches

# Of scaled logits [n, V], top_p and min_p [n]: the least logit [n] that is kept; -inf where top_p
# is 1 or more.
LeastInTopP = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Filters(Protocol):
    """Of rows that choose in the same way; columns [n, 1]."""

    @property
    def draw(self) -> Draw: ...
    @property
    def top_k(self) -> torch.Tensor: ...
    @property
    def top_p(self) -> torch.Tensor: ...
    @property
    def min_p(self) -> torch.Tensor: ...
    @property
    def has_min_p(self) -> bool: ...


@dataclass(frozen=True)
class _InputFilters:
    """As a graph's inputs have them: every row's may be on."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw: Draw = Draw.SHORT_TOP_K
    has_min_p: bool = True


def least_kept(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that each row keeps, be its top_k short or off."""
    scaled = logits.float() * inputs.inverse_temperature[:, None]
    largest = scaled.topk(min(SHORT, logits.shape[1]), dim=-1).values
    columns = (inputs.top_k, inputs.top_p, inputs.min_p)
    filters = _InputFilters(*(column[:, None] for column in columns))
    is_short = filters.top_k <= SHORT
    by_min_p = _min_p_threshold(largest[:, :1], filters)
    return torch.where(is_short, top_k_threshold(largest, filters), by_min_p)[:, 0]


def is_top_p_alone(inputs: Inputs) -> torch.Tensor:
    """bool [rows]: top_p of the whole vocabulary, for which `least_kept` is not enough."""
    return (inputs.top_k > SHORT) & (inputs.top_p < 1.0)


def least_in_top_p(x: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`LeastInTopP` by a sort."""
    mass = torch.exp(x - x.amax(dim=-1, keepdim=True))
    descending = mass.sort(dim=-1, descending=True).values
    units = _units(descending)
    kept = _above(units) < _needed(units.sum(dim=-1, keepdim=True), top_p[:, None])
    least_mass = torch.maximum(_least(descending, kept), min_p[:, None])
    least = x.masked_fill(mass < least_mass, torch.inf).amin(dim=-1)
    return least.masked_fill(top_p >= 1.0, -torch.inf)


def dropped_tokens(
    x: torch.Tensor, filters: Filters, in_top_p: LeastInTopP = least_in_top_p
) -> torch.Tensor | None:
    """Which tokens, bool [n, V], the filters take out of scaled logits, float32 [n, V]."""
    match filters.draw:
        case Draw.SHORT_TOP_K:
            return x < top_k_threshold(x.topk(min(SHORT, x.shape[-1]), dim=-1).values, filters)
        case Draw.LONG_TOP_K:
            return x < top_k_threshold(x.sort(dim=-1, descending=True).values, filters)
        case Draw.TOP_P:
            return x < in_top_p(x, filters.top_p[:, 0], filters.min_p[:, 0])[:, None]
    return (
        x < _min_p_threshold(x.amax(dim=-1, keepdim=True), filters) if filters.has_min_p else None
    )


def top_k_threshold(descending: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The least logit [n, 1] that is kept, of rows that hold at least the top_k largest."""
    places = torch.arange(descending.shape[-1], device=descending.device)
    in_top_k = places < filters.top_k
    units = _units(torch.exp(descending - descending[:, :1])) * in_top_k
    kept = (_above(units) < _needed(units.sum(dim=-1, keepdim=True), filters.top_p)) & in_top_k
    return torch.maximum(_least(descending, kept), _min_p_threshold(descending[:, :1], filters))


def _units(mass: torch.Tensor) -> torch.Tensor:
    return (mass * MASS_UNITS).long()


def _above(units: torch.Tensor) -> torch.Tensor:
    """What is before each in a descending row."""
    return units.cumsum(dim=-1) - units


def _least(descending: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[n, 1]: of those that are kept, the last of each row; one at least, be it no number."""
    num_kept = kept.sum(dim=-1, keepdim=True).clamp_min(1)
    return descending.gather(-1, num_kept - 1)


def _needed(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The units, int64 [n, 1], above a token that leave it out."""
    share = total.float() * top_p.clamp_max(_OFF)
    return share.ceil().long().clamp_min(1)


def _min_p_threshold(largest: torch.Tensor, filters: Filters) -> torch.Tensor:
    return largest + torch.log(filters.min_p)
