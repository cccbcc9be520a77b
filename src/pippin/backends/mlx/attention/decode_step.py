"""One decode step, as what a model sees of the rows depends on it: arrays, host facts and masks.

A step is a tree of arrays and a few host facts (`StepShape`). Steps of equal shape build the same
graph, so that the graph can be compiled once; nothing here reads a value back. Knows no layer's
view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import mlx.core as mx

from pippin.backends.mlx.attention.drafts_seen import places_of_tokens, visible_to_tokens
from pippin.backends.mlx.attention.head_ropes import DeferredRopes
from pippin.backends.mlx.attention.paths import AttentionPaths
from pippin.backends.mlx.attention.split_attention import shared_mask
from pippin.backends.mlx.layout import LayerCache, Layout

Tree = dict[str, Any]

NOT_ITS_KEYS = "attention was given keys that no cache had returned"
WITHOUT_ITS_MASK = "attention was not given both a cache and the mask of that cache"


class Lender(Protocol):
    """A layer's view, which other layers may read too."""

    def lends(self, keys: mx.array) -> bool:
        """Whether these are what its `update_and_fetch` returned."""
        ...


@dataclass(frozen=True)
class RowMask:
    """Passed by the model, untouched, from `make_mask` to the substituted attention function."""

    window: int | None
    step: DecodeStep


@dataclass(frozen=True)
class CohortShape:
    num_lines: int
    columns: tuple[int, ...]  # by window class of the layout
    full: tuple[bool, ...]  # by window class: every line fills every column
    shared: tuple[int, ...]  # by window class: tokens before the columns, held once for all lines


@dataclass(frozen=True)
class MainsShape:
    @property
    def compiles(self) -> bool:
        """Whether a step of this shape is worth being compiled."""
        return True


@dataclass(frozen=True)
class CohortsShape(MainsShape):
    cohorts: tuple[CohortShape, ...]
    aligned: bool  # one cohort whose lines are the rows, in order: nothing needs to be gathered
    paths: AttentionPaths

    @property
    def compiles(self) -> bool:
        """Other shapes do not last."""
        return self.aligned


@dataclass(frozen=True)
class DraftsShape:
    """Of a step that may verify drafts: rows' tails are of different lengths."""

    num_tokens: int  # of each row
    keeps: bool = True  # drafts are verified, or were in the step before


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step and its graph depends on."""

    width: int
    mains: MainsShape
    drafts: DraftsShape | None = None


class DecodeStep:
    """One step's shared arrays, and masks made from them once for all layers.

    tokens   int32 [width, 1]
    offset   int32 [width]        where each row's token stands
    cursor   int32 [1]            the tail column that is written
    written  bool  [width, TAIL]  tail columns that hold a token of their row
    tails    [keys, values] by KV cache: [width, heads, TAIL, dim]
    states   entries by state cache: [width, ...]

    With cohorts:
    order    int32 [width]        each row's line among all cohorts' lines; a blank one comes last
    cohorts  kv by KV cache: [lines, heads, columns, dim]; shared likewise: [1, heads, tokens, dim],
             or empty; lines: the row of each line; lengths: its tokens;
             stored: by window class, how many of them are in the columns

    Packed:
    mains    [keys, values] by KV cache and segment: [heads, columns, dim]
    places   int32 [width, segments, 2] by window class: where a row's columns begin in a segment,
             and how many of them it sees
    visible  bool [width, TAIL] by window class

    With drafts tokens are [width, n] and cursors [width]. `places` are then those of a row that is
    as short as it may be, and what a token sees of them depends on its cursor.
    """

    def __init__(self, layout: Layout, shape: StepShape, tree: Tree) -> None:
        self.layout = layout
        self.shape = shape
        self.tree = tree
        mains = shape.mains
        self.cohorts = mains.cohorts if isinstance(mains, CohortsShape) else ()
        self.aligned = isinstance(mains, CohortsShape) and mains.aligned
        self.ropes: DeferredRopes | None = None  # where attention computes them
        self.lenders: WeakValueDictionary[int, Lender] = WeakValueDictionary()  # by id of keys
        self._tail_masks: dict[object, mx.array] = {}
        self._main_masks: dict[object, mx.array | None] = {}
        self._windows: dict[int, tuple[mx.array, int | None]] = {}  # by id of a concatenated mask
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

    def lender(self, keys: mx.array) -> Lender | None:
        """The view whose keys these are: of the layer that attends, or of another one."""
        rows = self.lenders.get(id(keys))
        return rows if rows is not None and rows.lends(keys) else None

    def tail_mask(self, cache: LayerCache, window: int | None) -> mx.array:
        """bool [width, 1, 1, TAIL]"""
        tail_len = self.tree["written"].shape[1]
        chunk = window if cache.chunked else None
        narrow = window if window is not None and window < tail_len else None
        key = narrow, chunk
        if key not in self._tail_masks:
            visible: mx.array = self.tree["written"]
            if chunk is not None:
                visible = visible & (self.tail_ages() <= self.tree["offset"][:, None] % chunk + 1)
            elif narrow is not None:
                visible = visible & (self.tail_ages() <= narrow)
            self._tail_masks[key] = visible[:, None, None, :]
        return self._tail_masks[key]

    def tail_ages(self) -> mx.array:
        """int32 [width, TAIL]: 1 for a row's newest token."""
        return mx.cumsum(self.tree["written"].astype(mx.int32), axis=1, reverse=True)

    def main_mask(self, number: int, cache: LayerCache, window: int | None) -> mx.array | None:
        """bool [lines, 1, 1, columns], or None where every line fills every column."""
        key = (number, cache.window, window, cache.chunked)
        if key not in self._main_masks:
            self._main_masks[key] = self._build_main_mask(number, cache, window)
        return self._main_masks[key]

    def shared_mask(self, number: int, num_shared: int, window: int | None) -> mx.array | None:
        """As `attend_shared` has its scores, or None where every line sees all of them."""
        if window is None:
            return None
        key = (number, "shared", window)
        if key not in self._main_masks:
            lines = self.tree["cohorts"][number]["lines"]
            position = mx.take(self.tree["offset"], lines)[:, None]
            visible = mx.arange(num_shared)[None] > position - window
            self._main_masks[key] = shared_mask(visible)
        return self._main_masks[key]

    def note_window(self, mask: mx.array, window: int | None) -> None:
        """A mask that layers of both ways may be given: who reads pieces asks for its window."""
        self._windows[id(mask)] = mask, window

    def window_of(self, mask: Any) -> int | None:
        """The window of a mask that `make_mask` has made in this step."""
        if isinstance(mask, RowMask):
            return mask.window
        if id(mask) not in self._windows:
            raise TypeError(WITHOUT_ITS_MASK)
        return self._windows[id(mask)][1]

    def _build_main_mask(
        self, number: int, cache: LayerCache, window: int | None
    ) -> mx.array | None:
        place = self.layout.window_classes.index(cache.window)
        shape, cohort = self.cohorts[number], self.tree["cohorts"][number]
        if window is None and shape.full[place]:
            return None
        column = mx.arange(shape.columns[place])[None]
        stored = cohort["stored"][place][:, None]
        visible: mx.array = column < stored
        if window is not None:
            position = mx.take(self.tree["offset"], cohort["lines"])[:, None]
            first = cohort["lengths"][:, None] - stored  # position of column 0
            oldest = position // window * window if cache.chunked else position - window + 1
            visible = visible & (first + column >= oldest)
        return visible[:, None, None, :]
