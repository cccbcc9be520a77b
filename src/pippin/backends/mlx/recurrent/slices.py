"""Runs a recurrence of mlx-lm's in slices, so that the states between them can be tapped.

Its kernels give the state after the last token alone. Each slice starts from the state of the one
before it, in float32: the numbers are those of one call, to the bit, for a few launches a slice.
Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from pippin.backends.mlx.recurrent.blocks import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.calls import Call
from pippin.backends.mlx.recurrent.taps import (
    block_states_are_tapped,
    record_block_states,
    wanted_states,
)


def run_in_slices(
    function: Callable[..., tuple[mx.array, mx.array]], call: Call
) -> tuple[mx.array, mx.array]:
    """`function(**call.arguments)`; sliced only inside of `tap_block_states`."""
    if not block_states_are_tapped():
        return function(**call.arguments)
    wanted = wanted_states()
    num_tokens = call.num_tokens
    cuts = range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS) if wanted is None else wanted
    outputs: list[mx.array] = []
    states: dict[int, mx.array] = {}  # by the number of their block
    start, state = 0, cast(mx.array, call.arguments.get("state"))  # or None, before the first
    for end in (*(cut for cut in cuts if cut < num_tokens), num_tokens):
        y, state = function(**{**call.between(start, end).arguments, "state": state})
        outputs.append(y)
        states[(end - 1) // BLOCK_TOKENS] = state
        start = end
    record_block_states(states)
    return mx.concatenate(outputs, axis=1) if len(outputs) > 1 else outputs[0], state
