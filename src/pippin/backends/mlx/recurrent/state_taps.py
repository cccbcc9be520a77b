"""Recurrent states at 64-token steps inside one prefill forward, for checkpoints that cost nothing.

A recurrent layer keeps the inputs of its convolutions and the state of its recurrence, in this
order. Both pass through substituted functions, which record them; whether a model's layers really
are of this form is found out at load, and if they are not, chunks end where checkpoints are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import Layout, ProbeKV
from pippin.backends.mlx.recurrent.taps import ColumnMajor, StateTaps, tap_states
from pippin.types import GRID


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
