"""Rows of logits to tokens in the future map, in one of the ways that graphs are captured for."""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.draw import draw
from pippin.backends.torch.step.decode_inputs import Choice, Inputs
from pippin.backends.torch.step.filters import least_kept


def choose(
    logits: torch.Tensor,  # [rows, vocab]
    inputs: Inputs,
    future: torch.Tensor,  # int32 [slots]: the future map
    choice: Choice,
) -> torch.Tensor:
    """int32 [2, rows]: tokens, if they are not left to others; whether logits are no numbers."""
    told = torch.empty(2, logits.shape[0], dtype=torch.int32, device=logits.device)
    if choice is Choice.GREEDY:
        draw(logits, inputs.slot, future, told)
    elif choice is Choice.DRAWN:
        draw(
            logits,
            inputs.slot,
            future,
            told,
            inverse_temperature=inputs.inverse_temperature,
            thresholds=least_kept(logits, inputs),
            noisy=inputs.noisy,
            keys=inputs.keys,
        )
    else:
        told[1] = logits[:, 0].isnan()
    return told
