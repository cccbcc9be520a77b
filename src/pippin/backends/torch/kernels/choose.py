"""Rows of logits to tokens in the future map, in one of the ways that graphs are captured for."""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.draw import draw
from pippin.backends.torch.kernels.top_p import least_in_top_p
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.filters import is_top_p_alone, least_kept


def choose(
    logits: torch.Tensor,  # [rows, vocab]
    inputs: Inputs,
    future: torch.Tensor,  # int32 [slots]: the future map
    choice: Choice,
) -> torch.Tensor:
    """int32 [2, rows]: tokens, if they are not left to the sampler; whether logits are NaN."""
    drawn = torch.empty(2, logits.shape[0], dtype=torch.int32, device=logits.device)
    if choice is Choice.GREEDY:
        draw(logits, inputs.slot, future, drawn)
    elif choice is not Choice.LOGITS:
        draw(
            logits,
            inputs.slot,
            future,
            drawn,
            inverse_temperature=inputs.inverse_temperature,
            thresholds=_thresholds(logits, inputs, choice),
            noisy=inputs.noisy,
            keys=inputs.keys,
        )
    else:
        drawn[1] = logits[:, 0].isnan()
    return drawn


def _thresholds(logits: torch.Tensor, inputs: Inputs, choice: Choice) -> torch.Tensor:
    """float32 [rows]: the least scaled logit that each row keeps."""
    least = least_kept(logits, inputs)
    if choice is not Choice.TOP_P:
        return least
    is_alone = is_top_p_alone(inputs)
    top_p = inputs.top_p.masked_fill(~is_alone, torch.inf)
    in_top_p = least_in_top_p(logits, top_p, inputs.min_p, inputs.inverse_temperature)
    return torch.where(is_alone, in_top_p, least)
