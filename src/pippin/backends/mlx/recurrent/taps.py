"""What recurrent layers let others see of one forward; knows no model and no cache.

The blocked recurrences carry the state from block to block anyway, so a checkpoint on the
64-token grid costs a reference. Each recurrent layer of a forward records once, in layer order:

    with tap_states() as taps:
        logits = model(tokens, cache=cache)
    taps.states[i][n]  # state of recurrent layer i after 64 * (n + 1) tokens of this forward

The last entry of a layer is its final state, also where the last block is short. A row that
ends early (masked to the right) keeps its own final state in every later entry. A recurrence that
pays for each state asks which are wanted and records these alone, by the same numbers `n`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import mlx.core as mx

BlockStates = list[mx.array] | dict[int, mx.array]


class ColumnMajor(list[mx.array]):
    """Block states that lie transposed in memory: copied that way, they are copied in one run."""


@dataclass
class StateTaps:
    wanted: Sequence[int] | None = None  # after how many tokens, rising; None: after every block
    states: list[BlockStates] = field(default_factory=list)
    # What each depthwise convolution reads, its kept tokens first: [B, K - 1 + T, C]. The tokens
    # that a layer must keep after t tokens of the forward are [:, t : t + K - 1] of it.
    conv_inputs: list[mx.array] = field(default_factory=list)


_active: ContextVar[StateTaps | None] = ContextVar("pippin_state_taps", default=None)


@contextmanager
def tap_states(wanted: Sequence[int] | None = None) -> Iterator[StateTaps]:
    """Collect what recurrent layers that run inside the `with` record."""
    taps = StateTaps(wanted)
    token = _active.set(taps)
    try:
        yield taps
    finally:
        _active.reset(token)


def active_taps() -> StateTaps | None:
    return _active.get()


def record_block_states(states: BlockStates) -> None:
    """Called once per recurrent layer and forward; without a tap it does nothing."""
    taps = _active.get()
    if taps is not None:
        taps.states.append(states)


def record_conv_input(x: mx.array) -> None:
    """Called by each depthwise convolution; without a tap it does nothing."""
    taps = _active.get()
    if taps is not None:
        taps.conv_inputs.append(x)
