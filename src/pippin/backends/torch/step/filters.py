"""What top_k, top_p and min_p take out of rows of scaled logits. Draws no tokens, knows no slots.

The rules are those of `sampling/rules.py`: thresholds on masses counted in whole units, so that
neither the order of a sort nor that of a sum matters. top_p without top_k has two forms that keep
the same tokens: a sort, and on GPUs one without (`kernels/top_p.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from pippin.backends.sampling.batches import DrawGroup
from pippin.backends.sampling.rules import MASS_UNITS, SHORT, Draw
from pippin.backends.torch.step.decode_inputs import Inputs

_OFF = 2.0  # a top_p that no sum of masses reaches

# Of scaled logits [n, V], top_p and min_p [n]: the least logit [n] that is kept; -inf where top_p
# is 1 or more.
LeastInTopP = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def least_kept(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that each row keeps, be its top_k short or off."""
    scaled = logits.float() * inputs.inverse_temperature[:, None]
    largest = scaled.topk(min(SHORT, logits.shape[1]), dim=-1).values
    columns = (inputs.top_k, inputs.top_p, inputs.min_p)
    top_k, top_p, min_p = (column[:, None] for column in columns)
    by_top_k = _top_k_threshold(largest, top_k, top_p, min_p)
    by_min_p = _min_p_threshold(largest, min_p)
    return torch.where(top_k <= SHORT, by_top_k, by_min_p)[:, 0]


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
    x: torch.Tensor, group: DrawGroup[torch.Tensor], in_top_p: LeastInTopP = least_in_top_p
) -> torch.Tensor | None:
    """Which tokens, bool [n, V], the group's filters take out of scaled logits, float32 [n, V]."""
    columns = (group.top_k, group.top_p, group.min_p)
    match group.draw:
        case Draw.SHORT_TOP_K:
            largest = x.topk(min(SHORT, x.shape[-1]), dim=-1).values
            return x < _top_k_threshold(largest, *columns)
        case Draw.LONG_TOP_K:
            return x < _top_k_threshold(x.sort(dim=-1, descending=True).values, *columns)
        case Draw.TOP_P:
            return x < in_top_p(x, group.top_p[:, 0], group.min_p[:, 0])[:, None]
    if not group.has_min_p:
        return None
    return x < _min_p_threshold(x.amax(dim=-1, keepdim=True), group.min_p)


def _top_k_threshold(
    descending: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The least logit [n, 1] that is kept, of rows that hold at least the top_k largest."""
    in_top_k = torch.arange(descending.shape[-1], device=descending.device) < top_k
    units = _units(torch.exp(descending - descending[:, :1])) * in_top_k
    kept = (_above(units) < _needed(units.sum(dim=-1, keepdim=True), top_p)) & in_top_k
    return torch.maximum(_least(descending, kept), _min_p_threshold(descending, min_p))


def _units(mass: torch.Tensor) -> torch.Tensor:
    return (mass * MASS_UNITS).long()


def _above(units: torch.Tensor) -> torch.Tensor:
    """What is before each in a descending row."""
    return units.cumsum(dim=-1) - units


def _least(descending: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """[n, 1]: of those that are kept, the last of each row; one at least, even if it is NaN."""
    num_kept = kept.sum(dim=-1, keepdim=True).clamp_min(1)
    return descending.gather(-1, num_kept - 1)


def _needed(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The units, int64 [n, 1], above a token that leave it out."""
    share = total.float() * top_p.clamp_max(_OFF)
    return share.ceil().long().clamp_min(1)


def _min_p_threshold(descending: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Of rows [n, ..] that begin with their largest logit."""
    return descending[:, :1] + torch.log(min_p)


def in_top_p_by(kernels: bool) -> LeastInTopP:
    """The same in captured steps and in the sampler: a row's company decides which it meets."""
    if not kernels:
        return least_in_top_p
    from pippin.backends.torch.kernels import top_p

    return top_p.least_in_top_p
