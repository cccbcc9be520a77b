"""Runs a recurrence of mlx-lm's in slices of 64 tokens, so that states between them can be tapped.

Its kernels give the state after the last token alone. Each slice starts from the state of the one
before it, in float32: the numbers are those of one call, to the bit, for one more launch a slice.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from pippin.backends.mlx.recurrent.blocks import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.calls import Call
from pippin.backends.mlx.recurrent.taps import block_states_are_tapped, record_block_states


def run_in_slices(
    function: Callable[..., tuple[mx.array, mx.array]], call: Call
) -> tuple[mx.array, mx.array]:
    """`function(**call.arguments)`; sliced only inside of `tap_block_states`."""
    if not block_states_are_tapped():
        return function(**call.arguments)
    outputs: list[mx.array] = []
    states: list[mx.array] = []
    for start in range(0, call.num_tokens, BLOCK_TOKENS):
        part = dict(call.between(start, start + BLOCK_TOKENS).arguments)
        if states:
            part["state"] = states[-1]
        y, state = function(**part)
        outputs.append(y)
        states.append(state)
    record_block_states(states)
    return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0], states[-1]
