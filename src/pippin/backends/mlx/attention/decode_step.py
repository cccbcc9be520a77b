"""One decode step, as what a model sees of the rows depends on it: arrays, host facts and masks.

A step is a tree of arrays and a few host facts (`StepShape`). Steps of equal shape build the same
graph, so that the graph can be compiled once; nothing here reads a value back. Knows no layer's
view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx

from pippin.backends.mlx.attention.packed_rows import (
    AttentionPaths,
    columns_of_rows,
    places_of_tokens,
    visible_to_tokens,
)
from pippin.backends.mlx.layout import LayerCache, Layout

Tree = dict[str, Any]

NOT_ITS_KEYS = "attention was given keys that no cache had returned"
WITHOUT_ITS_MASK = "attention was not given both a cache and the mask of that cache"


@dataclass(frozen=True)
class RowMask:
    """Passed by the model, untouched, from `make_mask` to the substituted attention function."""

    window: int | None
    step: DecodeStep


@dataclass(frozen=True)
class PackedShape:
    columns: tuple[tuple[int, ...], ...]  # by window class of the layout, by segment
    longest: tuple[int, ...]  # by window class: no row has more columns
    paths: AttentionPaths


@dataclass(frozen=True)
class DraftsShape:
    """Of a step that may verify drafts: rows' tails are of different lengths."""

    num_tokens: int  # of each row
    keeps: bool = True  # drafts are verified, or were in the step before


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step and its graph depends on."""

    width: int
    mains: PackedShape | None  # None: where rows lie is in a KV table
    drafts: DraftsShape | None = None


class DecodeStep:
    """One step's shared arrays, and masks made from them once for all layers.

    tokens   int32 [width, 1]
    offset   int32 [width]        where each row's token stands
    cursor   int32 [width]        its tail column, before which are those that the row has written
    tails    [keys, values] by KV cache: [width, heads, TAIL, dim]
    states   entries by state cache: [width, ...]

    With a KV table:
    kv_table                      cpu/cpp/kv_table.h

    Else:
    mains    [keys, values] by KV cache and segment: [heads, columns, dim]
    places   int32 [width, segments, 2] by window class: where a row's columns begin in a segment,
             and how many there are; for a kernel: how many of them it sees
    visible  bool [width, TAIL] by window class, for a kernel
    ends     int32 [width], for plain operations: the position after a row's last column in mains

    With drafts tokens are [width, n]. `places` are then those of a row that is as short as it may
    be, and what a token sees of them depends on its cursor.
    """

    def __init__(self, layout: Layout, shape: StepShape, tree: Tree) -> None:
        self.layout = layout
        self.shape = shape
        self.tree = tree
        # Layers' views, by the id of the keys that they returned: other layers may read them too.
        self.lenders: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self.given: list[mx.array] = []  # masks that models were given
        self._columns: dict[int, tuple[mx.array, mx.array]] = {}  # by window class
        self._masks: dict[object, mx.array] = {}
        self._packed: dict[int, tuple[mx.array, mx.array]] = {}  # by window class

    def packed(self, number: int) -> tuple[mx.array, mx.array]:
        """Of a window class, what each token sees: places in mains, and of the tail."""
        if self.shape.drafts is None:
            return self.tree["places"][number], self.tree["visible"][number]
        if number not in self._packed:
            tail_len = self.tree["tails"][0][0].shape[2]
            window, num_tokens = self.layout.window_classes[number], self.shape.drafts.num_tokens
            places = self.tree["places"][number]
            own = self.tree["cursor"][:, None] + mx.arange(num_tokens)
            self._packed[number] = (
                places_of_tokens(places, own, window),
                visible_to_tokens(own, window, tail_len),
            )
        return self._packed[number]

    def lender(self, keys: mx.array) -> Any:
        """The view whose keys these are: of the layer that attends, or of another one."""
        rows = self.lenders.get(id(keys))
        return rows if rows is not None and rows.lends(keys) else None

    def columns(self, number: int) -> tuple[mx.array, mx.array]:
        """Of a window class, what rows hold in mains and tail as if joined: int32 [width, columns],
        which column of all segments each is in mains; and [width, columns and TAIL], the position
        of each, -1 where it is no token's."""
        if number not in self._columns:
            assert self.shape.mains is not None
            sizes, longest = self.shape.mains.columns[number], self.shape.mains.longest[number]
            at, num_held = columns_of_rows(self.tree["places"][number], sizes, longest)
            column, ends = mx.arange(longest)[None], self.tree["ends"][:, None]
            main = mx.where(column < num_held, ends - num_held + column, -1)
            tail = ends + mx.arange(self.tree["tails"][0][0].shape[2])
            last = self.tree["offset"] + self.tree["tokens"].shape[1] - 1
            tail = mx.where(tail <= last[:, None], tail, -1)
            self._columns[number] = at, mx.concatenate([main, tail], axis=1)
        return self._columns[number]

    def mask(self, cache: LayerCache, window: int | None) -> mx.array:
        """What each token sees of a layer's joined columns: bool [width, 1, tokens, columns]."""
        number = self.layout.window_classes.index(cache.window)
        key = number, window, cache.chunked
        if key not in self._masks:
            position = self.columns(number)[1][:, None]
            own = self.tree["offset"][:, None] + mx.arange(self.tree["tokens"].shape[1])
            own = own[..., None]
            visible = position >= 0
            if self.shape.drafts is not None:  # else all that is there was before
                visible = visible & (position <= own)
            if window is not None:
                oldest = own // window * window if cache.chunked else own - window + 1
                visible = visible & (position >= oldest)
            self._masks[key] = visible[:, None]
        return self._masks[key]
