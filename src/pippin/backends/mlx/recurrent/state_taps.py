"""Recurrent states at 64-token steps inside one prefill forward, for checkpoints that cost nothing.

A recurrent layer keeps the inputs of its convolutions and the state of its recurrence, in this
order. Both pass through substituted functions, which record them; whether a model's layers really
are of this form is found out at load, and if they are not, chunks end where checkpoints are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.layout import Layout, ProbeKV
from pippin.backends.mlx.recurrent.taps import (
    ColumnMajor,
    LayerStates,
    tap_block_states,
    tap_conv_inputs,
)
from pippin.types import GRID, Component


class StateTaps:
    """Around one forward: `with StateTaps(layout) as taps`, then ask it for states.

    `wanted`: after how many tokens it will be asked for them; None: any on the grid.
    """

    def __init__(self, layout: Layout, wanted: Sequence[int] | None = None) -> None:
        self._layout = layout
        self._wanted = wanted
        self._stack = ExitStack()
        self._blocks: LayerStates = []
        self._convs: list[mx.array] = []
        self.column_major = False  # how the states of recurrences lie in memory

    def __enter__(self) -> StateTaps:
        self._blocks = self._stack.enter_context(tap_block_states(self._wanted))
        self._convs = self._stack.enter_context(tap_conv_inputs())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def states_after(self, num_tokens: int) -> dict[int, list[mx.array]]:
        """What every recurrent cache holds `num_tokens` into the forward, a multiple of GRID."""
        assert num_tokens % GRID == 0, "states are tapped on the grid only"
        blocks, convs = iter(self._blocks), iter(self._convs)
        states: dict[int, list[mx.array]] = {}
        for index in self._layout.indices(Component.STATE):
            shapes = self._layout.caches[index].shapes
            entries = []
            for kept, _ in shapes[: num_convs(shapes)]:
                # A copy: a view would keep the input of the whole forward alive.
                entries.append(mx.contiguous(next(convs)[:, num_tokens : num_tokens + kept]))
            if len(entries) < len(shapes):
                layer = next(blocks)
                entries.append(layer[num_tokens // GRID - 1])
                self.column_major = isinstance(layer, ColumnMajor)
            states[index] = entries
        return states

    @property
    def num_recorded(self) -> tuple[int, int]:
        return len(self._convs), len(self._blocks)


def num_convs(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Entries of a recurrent cache that a convolution keeps: [tokens, channels] each, and first."""
    return sum(1 for shape in shapes if len(shape) == 2)


def can_tap(layout: Layout, forward: Callable[[mx.array, list[Any]], mx.array]) -> bool:
    """Try it: one forward of two blocks, built but never evaluated, must record every entry."""
    indices = layout.indices(Component.STATE)
    if not indices:
        return False
    views: list[Any] = [
        ArraysCache(size=len(cache.shapes)) if cache.is_state else ProbeKV()
        for cache in layout.caches
    ]
    with StateTaps(layout) as taps:
        forward(mx.zeros((1, 2 * GRID), dtype=mx.int32), layout.nest(views))
    shapes = [layout.caches[index].shapes for index in indices]
    convs = sum(num_convs(entries) for entries in shapes)
    blocks = sum(1 for entries in shapes if num_convs(entries) < len(entries))
    if taps.num_recorded != (convs, blocks):
        return False
    tapped = taps.states_after(GRID)
    return all(
        tuple(entry.shape[1:]) == shape
        for index in indices
        for entry, shape in zip(tapped[index], layout.caches[index].shapes, strict=True)
    )
