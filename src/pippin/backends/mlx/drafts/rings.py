"""Keys and values of a drafter, by slot: those of a row's last tokens.

    place of a token    its position, less where the slot's ring starts
    cell of a place     the first `num_first` places keep theirs; then round and round

Outside rows and prefix cache: a slot's ring starts where it is first fed, and is dropped with the
slot. What is missing costs drafts, never a token. One cell more is for what is not to be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.payloads.packing import KV

IN_FLIGHT = 2  # a ring that is read, and one that is written


class RingLayer(NamedTuple):
    """Of a layer: heads and channels of keys and of values."""

    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: mx.Dtype
    window: int | None = None


@dataclass(frozen=True)
class RingShape:
    layers: tuple[RingLayer, ...]
    length: int  # tokens
    num_first: int  # of these, so many are never overwritten
    num_wrong: int  # cells that drafts which were rejected may have been written to

    @property
    def nbytes(self) -> int:
        """Of a slot."""
        channels = sum(
            heads * dim * layer.dtype.size
            for layer in self.layers
            for heads, dim in (layer.keys, layer.values)
        )
        return IN_FLIGHT * (self.length + 1) * channels

    def blank(self, starts: mx.array) -> Rings:
        def zeros(side: tuple[int, int], dtype: mx.Dtype) -> mx.array:
            return mx.zeros((len(starts), side[0], self.length + 1, side[1]), dtype)

        kv = [(zeros(own.keys, own.dtype), zeros(own.values, own.dtype)) for own in self.layers]
        return Rings(kv, starts)

    def cells(self, places: mx.array) -> mx.array:
        first, others = self.num_first, self.length - self.num_first
        return mx.where(places < first, places, first + (places - first) % others)

    def visible(self, places: mx.array, newest: mx.array, window: int | None) -> mx.array:
        """bool [rows, n, cells]: what tokens at these places [rows, n] see; `newest` likewise: the
        last place that a cell was written for by then."""
        cell, first = mx.arange(self.length + 1), self.num_first
        others = self.length - first
        newest, place = newest[..., None], places[..., None]
        held = mx.where(cell < first, cell, newest - (newest - cell) % others)
        oldest = place - (others - self.num_wrong) + 1
        if window is not None:
            oldest = mx.maximum(oldest, place - window + 1)
        seen = (held >= mx.maximum(oldest, first)) & (cell < self.length)
        if first:
            seen = seen | ((cell < first) & (held > place - (window or 1 << 30)))
        return seen & (held <= place)


@dataclass(frozen=True, eq=False)
class Rings:
    """Of several slots: keys and values [slots, heads, cells, dim] of each layer, and the position
    of each one's first place, int32 [slots]."""

    kv: list[KV]
    starts: mx.array

    def arrays(self) -> list[mx.array]:
        return [*(side for pair in self.kv for side in pair), self.starts]


class SlotRings:
    """The rings of all slots, as steps leave them."""

    def __init__(self, shape: RingShape) -> None:
        self.shape = shape
        self._held: dict[int, tuple[Rings, int]] = {}  # by slot, and its place there

    def __contains__(self, slot: int) -> bool:
        return slot in self._held

    def forget(self, slot: int) -> None:
        self._held.pop(slot, None)

    def keep(self, slots: Sequence[int], rings: Rings) -> None:
        self._held |= {slot: (rings, line) for line, slot in enumerate(slots) if slot}

    def arrays(self) -> list[mx.array]:
        found = {id(rings): rings for rings, _ in self._held.values()}
        return [array for rings in found.values() for array in rings.arrays()]

    def joined(self, slots: Sequence[int], starts: mx.array) -> Rings:
        """Of these slots in order; `starts` int32 [slots]: of those that have none yet."""
        found = [self._held.get(slot) for slot in slots]
        fresh = np.array([place is None for place in found])
        if fresh.all():
            return self.shape.blank(starts)
        first = next(place[0] for place in found if place is not None)
        in_order = all(
            place is None or (place[0] is first and place[1] == line)
            for line, place in enumerate(found)
        )
        if in_order and len(first.starts) == len(slots):
            if not fresh.any():
                return first
            return Rings(first.kv, mx.where(mx.array(fresh), starts, first.starts))
        blank = self.shape.blank(starts)
        parts = [(blank, line) if place is None else place for line, place in enumerate(found)]

        def lines(of: Sequence[mx.array]) -> mx.array:
            return mx.concatenate(
                [array[at : at + 1] for array, (_, at) in zip(of, parts, strict=True)]
            )

        kv = [
            (lines([r.kv[n][0] for r, _ in parts]), lines([r.kv[n][1] for r, _ in parts]))
            for n in range(len(self.shape.layers))
        ]
        return Rings(kv, lines([rings.starts for rings, _ in parts]))


class RingStep:
    """Tokens of rows that are fed at once: where they go and what they see, for all layers."""

    def __init__(
        self, shape: RingShape, places: mx.array, newest: mx.array, kept: mx.array | None = None
    ) -> None:
        """`places` int32 [rows, n]; `newest` [rows, 1]: the last of these that is kept; `kept`
        bool [rows, n]: which are, if not all."""
        self.offset = places[:, 0]
        cells = shape.cells(places)
        self.cells = cells if kept is None else mx.where(kept, cells, shape.length)
        self._shape, self._places, self._newest = shape, places, newest
        self._masks: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        """bool [rows, 1, n, cells]"""
        if window not in self._masks:
            seen = self._shape.visible(self._places, self._newest, window)
            self._masks[window] = seen[:, None]
        return self._masks[window]


class RingKV:
    """What a layer sees of rings."""

    def __init__(self, kv: KV, layer: RingLayer) -> None:
        self.keys, self.values = kv
        self._layer = layer
        self.step: RingStep

    @property
    def offset(self) -> mx.array:
        """int32 [rows]: the place of the first token."""
        return self.step.offset

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array:
        return self.step.mask(window_size or self._layer.window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KV:
        at = self.step.cells[:, None, :, None]
        self.keys, self.values = (
            mx.put_along_axis(held, mx.broadcast_to(at, new.shape), new, axis=2)
            for held, new in ((self.keys, keys), (self.values, values))
        )
        return self.keys, self.values
