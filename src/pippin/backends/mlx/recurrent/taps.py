"""What recurrent layers let others see of one forward, for checkpoints that cost nothing.

The blocked recurrences carry the state from block to block anyway, so a checkpoint on the
64-token grid costs a reference. Each recurrent layer of a forward records once, in layer order:

    with tap_states() as taps:
        logits = model(tokens, cache=cache)
    taps.states[i][n]  # state of recurrent layer i after 64 * (n + 1) tokens of this forward

The last entry of a layer is its final state, also where the last block is short. A row that
ends early (masked to the right) keeps its own final state in every later entry. A recurrence that
pays for each state asks which are wanted and records these alone, by the same numbers `n`.

A recurrent layer keeps the inputs of its convolutions and the state of its recurrence, in this
order. Whether a model's layers really are of this form is found out at load; if they are not,
chunks end where checkpoints are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.convolution import Conv1d
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import Layout, ProbeKV
from pippin.types import GRID

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


def states_after(
    taps: StateTaps, layout: Layout, num_tokens: int
) -> tuple[dict[int, list[mx.array]], bool]:
    """What every recurrent cache holds `num_tokens` into the forward, a multiple of GRID; and
    whether states of recurrences lie transposed in memory."""
    assert num_tokens % GRID == 0, "states are tapped on the grid only"
    blocks, conv_inputs = iter(taps.states), iter(taps.conv_inputs)
    states: dict[int, list[mx.array]] = {}
    for index in layout.state_indices:
        shapes = layout.caches[index].shapes
        # A copy: a view would keep the input of the whole forward alive.
        states[index] = [
            mx.contiguous(next(conv_inputs)[:, num_tokens : num_tokens + kept])
            for kept, _ in shapes[: num_convs(shapes)]
        ]
        if num_convs(shapes) < len(shapes):
            states[index].append(next(blocks)[num_tokens // GRID - 1])
    return states, any(isinstance(layer, ColumnMajor) for layer in taps.states)


def num_convs(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Entries of a recurrent cache that a convolution keeps: [tokens, channels] each, and first."""
    return sum(1 for shape in shapes if len(shape) == 2)


def can_tap(layout: Layout, forward: Callable[[mx.array, list[Any]], mx.array]) -> bool:
    """Try it: one forward of two blocks, built but never evaluated, must record every entry."""
    shapes = {index: layout.caches[index].shapes for index in layout.state_indices}
    if not shapes:
        return False
    views: list[Any] = [
        ArraysCache(size=len(cache.shapes)) if cache.is_state else ProbeKV()
        for cache in layout.caches
    ]
    with tap_states() as taps:
        forward(mx.zeros((1, 2 * GRID), dtype=mx.int32), layout.nest(views))
    num_blocks = sum(num_convs(entries) < len(entries) for entries in shapes.values())
    if len(taps.conv_inputs) != sum(map(num_convs, shapes.values())):
        return False
    if len(taps.states) != num_blocks:
        return False
    tapped, _ = states_after(taps, layout, GRID)
    return all(
        tuple(tuple(entry.shape[1:]) for entry in tapped[index]) == entries
        for index, entries in shapes.items()
    )


class ShiftConv1d(Conv1d):
    """Any tokens on CPUs, where mlx's own is slow; one token on GPUs, to be fused with the rest."""

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T + K - 1, C] -> [B, T, C]"""
        record_conv_input(x)
        num_out = x.shape[1] - len(self._each_tap) + 1
        y: mx.array
        if num_out > 1 and not self._on_cpu:
            y = super().__call__(x)  # type: ignore[no-untyped-call]
            return y
        shifted = [x[:, at : at + num_out] * tap for at, tap in enumerate(self._each_tap)]
        y = sum(shifted[1:], shifted[0])
        return y + self.bias if "bias" in self else y


def is_depthwise(conv: Conv1d) -> bool:
    """One channel a group, unit steps, no padding of its own: what recurrent layers use."""
    out_channels, _, channels_per_group = conv.weight.shape
    depthwise = channels_per_group == 1 and conv.groups == out_channels
    return bool(depthwise and conv.stride == 1 and conv.padding == 0 and conv.dilation == 1)


def use_shift_conv1d(conv: Conv1d, *, cpu: bool) -> None:
    """Make a depthwise `conv` over in place."""
    taps = conv.weight[:, :, 0].T
    conv._taps = mx.contiguous(taps)  # not a parameter: its name begins with _
    conv._each_tap = [mx.contiguous(tap) for tap in taps]
    mx.eval(conv._taps, conv._each_tap)  # or every compiled step would copy them again
    conv._on_cpu = cpu
    conv.__class__ = ShiftConv1d
