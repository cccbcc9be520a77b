"""Runs chunks of several prompts in one forward: ragged, right-padded, prefix in, prefix out.

keys of one row:   [ prefix, padded to the longest | this chunk, padded to the longest ]
                     restored or computed before     causal, so padding is never looked at

On GPUs the longest are rounded up, and rows of one token are added, so that forwards have few
shapes (shapes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache

from pippin.backends.mlx.attention.views import LentArray, lend
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import KV
from pippin.backends.mlx.shapes import Exact

EXACT = Exact()


@dataclass
class PromptState:
    """What one unfinished (or just finished) prompt holds: everything before position `length`."""

    length: int = 0
    kv: dict[int, KV] = field(default_factory=dict)  # by cache; absent while empty
    states: dict[int, list[mx.array]] = field(default_factory=dict)

    def arrays(self) -> list[mx.array]:
        flat = [array for pair in self.kv.values() for array in pair]
        return flat + [array for entries in self.states.values() for array in entries]


class Prefixes:
    """What rows have before their chunks in the layers of one window class, and what the chunks'
    queries see. Masks are made once for all layers that agree.

    Views hold this and not their batch: a batch that its views refer back to would keep its keys
    and values until Python's cycle collector comes by.
    """

    def __init__(
        self,
        starts: np.ndarray,  # int32 [rows]: positions of the chunks' first tokens
        lens: np.ndarray,  # int32 [rows]: tokens before them
        *,
        columns: int,  # that prefixes are padded to
        width: int,  # that chunks are padded to
        groups_heads: bool,
    ) -> None:
        self._starts = starts
        self.lens = lens
        self.columns = columns
        self._width = width
        self._groups_heads = groups_heads
        self.even = bool((lens == columns).all())  # nothing is padded
        self._masks: dict[object, mx.array | str | None] = {}

    def mask(
        self, window: int | None, return_array: bool, *, chunked: bool
    ) -> mx.array | str | None:
        """What each query may see; shared by all layers with the same window."""
        key = (window, return_array, chunked)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, return_array, chunked=chunked)
        return self._masks[key]

    @cached_property
    def positions(self) -> np.ndarray:
        """Of each column, int32 [rows, columns]; -1 where a prefix is padded."""
        column = np.arange(self.columns)[None]
        first = (self._starts - self.lens)[:, None]
        prefix = np.where(column < self.lens[:, None], first + column, -1)
        return np.concatenate([prefix, self._own], axis=1).astype(np.int32)

    @property
    def _own(self) -> np.ndarray:
        """Of each new token, int32 [rows, width]"""
        return self._starts[:, None] + np.arange(self._width, dtype=np.int32)

    def _build_mask(
        self, window: int | None, return_array: bool, *, chunked: bool
    ) -> mx.array | str | None:
        seen_len = int(self._starts.max()) if chunked else self.columns
        windowed = window is not None and seen_len + self._width > window
        if self.even and not windowed and not return_array:
            return "causal" if self._width > 1 else None
        position, own = self.positions[:, None], self._own[..., None]
        visible = (position >= 0) & (position <= own)
        if window is not None:
            visible &= position >= (own // window * window if chunked else own - window + 1)
        return mx.array(visible[:, None, None] if self._groups_heads else visible[:, None])


class ChunkKV:
    """The cache view of one attention layer during a prefill forward."""

    def __init__(
        self, cache: LayerCache, offset: int | mx.array, prefix: KV | None, prefixes: Prefixes
    ) -> None:
        self.offset = offset
        self.window = cache.window
        self._layer_cache = cache
        self._prefix = prefix
        self._prefixes = prefixes
        self.joined: KV | None = None  # with its prefix
        self.new: KV | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.new = self._layer_cache.kept(keys, values)
        self.joined = self.new if self._prefix is None else _concatenate(self._prefix, self.new)
        self.keys, self.values = self.joined  # mlx-lm's names: a model may read and replace them
        return self.joined

    def keys_and_values(self) -> tuple[LentArray, LentArray]:
        assert self.joined is not None
        assert self.new is not None
        return lend(self.joined, self.offset + self.new[0].shape[2])

    def num_before(self, row: int) -> int:
        """Tokens of the row's prefix that this layer has."""
        return int(self._prefixes.lens[row])

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> mx.array | str | None:
        chunked = self._layer_cache.chunked
        return self._prefixes.mask(window_size or self.window, return_array, chunked=chunked)

    def positions(self) -> mx.array:
        """Of each column, int32 [rows, columns]; -1 where it is padding."""
        return mx.array(self._prefixes.positions)


class ChunkBatch:
    """One forward's worth of chunks: their states before it, and after it."""

    def __init__(
        self,
        layout: Layout,
        chunks: Sequence[np.ndarray],
        states: Sequence[PromptState],
        shapes: Exact = EXACT,
    ) -> None:
        self._layout = layout
        self._states = states
        num_blank = shapes.rows(len(chunks)) - len(chunks)
        chunks = [*chunks, *[np.zeros(1, dtype=np.int32)] * num_blank]
        self._all_states = [*states, *(PromptState() for _ in range(num_blank))]
        self.lens = np.array([len(chunk) for chunk in chunks], dtype=np.int32)
        self.width = shapes.chunk(int(self.lens.max()))
        self.ragged = bool((self.lens != self.width).any())
        self._starts = np.array([state.length for state in self._all_states], dtype=np.int32)
        solo = len(chunks) == 1
        self.offset: int | mx.array = int(self._starts[0]) if solo else mx.array(self._starts)
        tokens = np.zeros((len(chunks), self.width), dtype=np.int32)
        for row, chunk in enumerate(chunks):
            tokens[row, : len(chunk)] = chunk
        self.tokens = mx.array(tokens)
        self._prefix_shape = shapes.prefix
        self._prefixes = {window: self._before(window) for window in layout.window_classes}
        self.views: list[Any] = [self._view(i, cache) for i, cache in enumerate(layout.caches)]
        self.caches = layout.nest(self.views)

    @property
    def shape(self) -> tuple[int, int, int]:
        """What arrays' shapes in the forward depend on: rows, new tokens, tokens before them."""
        return len(self.lens), self.width, self._prefix_shape(int(self._starts.max()))

    @property
    def last_positions(self) -> np.ndarray:
        return self.lens - 1

    def new_kv(self) -> dict[int, KV]:
        """This chunk's keys and values by cache: [rows, heads, width, dim]."""
        return {i: v.new for i, v in enumerate(self.views) if isinstance(v, ChunkKV) and v.new}

    def advance(self) -> None:
        """Move every row's state past its chunk."""
        for row, state in enumerate(self._states):
            n = int(self.lens[row])
            for i, cache in enumerate(self._layout.caches):
                if cache.is_state:
                    entries = self.views[i].cache
                    # In one memory order, so that what is carried on and what is restored from
                    # the tree take the same way through the products, to the last bit.
                    state.states[i] = [mx.contiguous(entry[row : row + 1]) for entry in entries]
                else:
                    state.kv[i] = self._extended(self.views[i], cache, state.kv.get(i), row, n)
            state.length += n

    def _extended(self, view: ChunkKV, cache: LayerCache, old: KV | None, row: int, n: int) -> KV:
        assert view.new is not None
        joined = view.joined
        if joined and len(self._all_states) == 1 and joined[0].shape[2] == view.num_before(row) + n:
            pair = joined  # prefix and chunk, for attention
        else:
            new = (view.new[0][row : row + 1, :, :n], view.new[1][row : row + 1, :, :n])
            pair = new if old is None else _concatenate(old, new)
        keep = cache.window
        if keep is not None and pair[0].shape[2] > keep:
            pair = (pair[0][:, :, -keep:], pair[1][:, :, -keep:])
        # In buffers of their own: a view would keep the whole batch alive, or the whole chunk.
        return mx.contiguous(pair[0]), mx.contiguous(pair[1])

    def _view(self, index: int, cache: LayerCache) -> Any:
        if cache.is_state:
            view: Any = ArraysCache(size=len(cache.shapes))
            view.cache = self._state_entries(index, cache)
            if self.ragged:
                view.lengths = mx.array(self.lens)
            return view
        prefixes = self._prefixes[cache.window]
        return ChunkKV(cache, self.offset, self._prefix(index, cache, prefixes), prefixes)

    def _before(self, window: int | None) -> Prefixes:
        cache = next(i for i in self._layout.kv_indices if self._layout.caches[i].window == window)
        pairs = (state.kv.get(cache) for state in self._all_states)
        lens = np.array([0 if p is None else p[0].shape[2] for p in pairs], dtype=np.int32)
        return Prefixes(
            *(self._starts, lens),
            columns=self._prefix_shape(int(lens.max())),
            width=self.width,
            groups_heads=self._layout.groups_heads,
        )

    def _state_entries(self, index: int, cache: LayerCache) -> list[mx.array | None]:
        rows = [state.states.get(index) for state in self._all_states]
        if all(row is None for row in rows):
            return [None] * len(cache.shapes)
        if len(rows) == 1:
            return list(rows[0] or ())
        fresh = [mx.zeros((1, *s), d) for s, d in zip(cache.shapes, cache.dtypes, strict=True)]
        filled = [fresh if row is None else row for row in rows]
        return [mx.concatenate(list(column), axis=0) for column in zip(*filled, strict=True)]

    def _prefix(self, index: int, cache: LayerCache, prefixes: Prefixes) -> KV | None:
        if prefixes.columns == 0:
            return None
        pairs = [state.kv.get(index) for state in self._all_states]
        if len(pairs) == 1 and prefixes.even:
            return pairs[0]
        sides = []
        for side, (heads, dim) in enumerate(cache.shapes):
            none = mx.zeros((1, heads, 0, dim), cache.dtypes[side])
            held = [none if pair is None else pair[side] for pair in pairs]
            sides.append(mx.concatenate([_padded(one, prefixes.columns) for one in held], axis=0))
        return sides[0], sides[1]


def _padded(held: mx.array, columns: int) -> mx.array:
    """[1, heads, columns, dim]"""
    return mx.pad(held, [(0, 0), (0, 0), (0, columns - held.shape[2]), (0, 0)])


def _concatenate(a: KV, b: KV) -> KV:
    return mx.concatenate([a[0], b[0]], axis=2), mx.concatenate([a[1], b[1]], axis=2)
