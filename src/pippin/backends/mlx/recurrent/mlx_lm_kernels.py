"""mlx-lm's recurrences where it has a Metal kernel: for which states, and those inside of a call.

Its kernels give the state after the last token alone. Where states between tokens are tapped, a
call runs in slices, each from the state of the one before it, in float32: the numbers are those of
one call, to the bit, for a few launches a slice. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import mlx.core as mx

from pippin.backends.mlx.device import on_metal
from pippin.backends.mlx.recurrent.blocks import BLOCK_TOKENS
from pippin.backends.mlx.recurrent.taps import active_taps, record_block_states

SIMD_WIDTH = 32  # mlx-lm's kernels give each lane a whole share of a row of the state

# What some of the tokens read, and the state after them; None: there is no state before them.
Recurrence = Callable[[slice, mx.array | None], tuple[mx.array, mx.array]]


def has_kernel(key_dim: int) -> bool:
    """For states with keys of so many channels: fewer operations than ours, and one launch."""
    return on_metal() and key_dim % SIMD_WIDTH == 0


def run_in_slices(
    recurrence: Recurrence, num_tokens: int, state: mx.array | None
) -> tuple[mx.array, mx.array]:
    """All tokens; sliced only inside of `tap_states`."""
    taps = active_taps()
    if taps is None:
        return recurrence(slice(None), state)
    every = range(BLOCK_TOKENS, num_tokens, BLOCK_TOKENS)
    cuts = [cut for cut in (every if taps.wanted is None else taps.wanted) if cut < num_tokens]
    outputs: list[mx.array] = []
    states: dict[int, mx.array] = {}  # by the number of their block
    for start, end in zip([0, *cuts], [*cuts, num_tokens], strict=True):
        y, state = recurrence(slice(start, end), state)
        outputs.append(y)
        states[(end - 1) // BLOCK_TOKENS] = state
    record_block_states(states)
    return mx.concatenate(outputs, axis=1) if cuts else outputs[0], cast(mx.array, state)
