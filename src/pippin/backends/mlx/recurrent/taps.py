"""Hands out recurrent states at block ends inside one forward; knows no model and no cache.

The blocked recurrences carry the state from block to block anyway, so a checkpoint on the
64-token grid costs a reference. Each recurrent layer of a forward records once, in layer order:

    with tap_block_states() as layers:
        logits = model(tokens, cache=cache)
    layers[i][n]  # state of recurrent layer i after 64 * (n + 1) tokens of this forward

The last entry of a layer is its final state, also where the last block is short. A row that
ends early (masked to the right) keeps its own final state in every later entry. A recurrence that
pays for each state asks which are wanted and records these alone, by the same numbers `n`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

LayerStates = list[list[mx.array] | dict[int, mx.array]]


class ColumnMajor(list[mx.array]):
    """Block states that lie transposed in memory: copied that way, they are copied in one run."""


_active: ContextVar[LayerStates | None] = ContextVar("pippin_block_states", default=None)
_wanted: ContextVar[Sequence[int] | None] = ContextVar("pippin_wanted_states", default=None)
_convs: ContextVar[list[mx.array] | None] = ContextVar("pippin_conv_inputs", default=None)


@contextmanager
def tap_block_states(wanted: Sequence[int] | None = None) -> Iterator[LayerStates]:
    """Collect the block states of every recurrent layer that runs inside the `with`.

    `wanted`: after how many tokens, in rising order; None: after every block.
    """
    layers: LayerStates = []
    token, wanted_token = _active.set(layers), _wanted.set(wanted)
    try:
        yield layers
    finally:
        _active.reset(token)
        _wanted.reset(wanted_token)


def wanted_states() -> Sequence[int] | None:
    return _wanted.get()


def record_block_states(states: list[mx.array] | dict[int, mx.array]) -> None:
    """Called once per recurrent layer and forward; without a tap it does nothing."""
    layers = _active.get()
    if layers is not None:
        layers.append(states)


def block_states_are_tapped() -> bool:
    return _active.get() is not None


@contextmanager
def tap_conv_inputs() -> Iterator[list[mx.array]]:
    """Collect what each depthwise convolution reads, its kept tokens first: [B, K - 1 + T, C].

    The tokens a layer must keep after t tokens of the forward are [:, t : t + K - 1] of it.
    """
    inputs: list[mx.array] = []
    token = _convs.set(inputs)
    try:
        yield inputs
    finally:
        _convs.reset(token)


def conv_inputs_are_tapped() -> bool:
    return _convs.get() is not None


def record_conv_input(x: mx.array) -> None:
    """Called by each depthwise convolution; without a tap it does nothing."""
    inputs = _convs.get()
    if inputs is not None:
        inputs.append(x)
