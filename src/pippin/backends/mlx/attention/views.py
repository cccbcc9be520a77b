"""What layers see of the decode rows in one step: their cache views.

`RowKV` is for plain operations, which cannot read rows where they lie: each row's columns are
gathered, padded to the longest row, in every step. A layer that attends in its own way is given
what was gathered, and a mask. `TableRowKV` is for CPUs that attend to a KV table in one operation:
a step's graph is then the same for any rows, compiled once for each number of them. `PackedRowKV`
is for a kernel that reads segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from pippin.backends.mlx.attention.decode_step import WITHOUT_ITS_MASK, DecodeStep, RowMask
from pippin.backends.mlx.attention.head_ropes import what_is_left
from pippin.backends.mlx.attention.packed_rows import PackedCall, gathered, with_columns
from pippin.backends.mlx.cpu.operations import operations
from pippin.backends.mlx.layout import LayerCache, Layout, Reads
from pippin.backends.mlx.payloads.packing import KV


@dataclass(frozen=True)
class LentArray:
    array: mx.array
    num_tokens: int | mx.array  # of every row, or int32 [rows]

    @property
    def shape(self) -> tuple[int, int, int | mx.array, int]:
        num_rows, heads, _, dim = self.array.shape
        return num_rows, heads, self.num_tokens, dim


def lend(kv: KV, num_tokens: int | mx.array) -> tuple[LentArray, LentArray]:
    return LentArray(kv[0], num_tokens), LentArray(kv[1], num_tokens)


def array_of(side: Any) -> mx.array:
    array: mx.array = side.array if isinstance(side, LentArray) else side
    return array


class RowKV:
    """The cache view of one attention layer during a decode step.

    One with latent attention (MLA) does, as mlx-lm's models write it for one token:

        scores = scaled q · latent + (scaled rotated q · rotated key), which the model itself adds

    A column is [latent: key and value at once | rotated key]. The model gets an identity in place
    of all rotated keys, so what it adds are its rotated queries, and no key is moved.
    `layout.discover` has found that its layers do compute this.
    """

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        """`place`: of the cache among the KV caches."""
        self.layer_cache = cache
        self.step = step
        self.offset = step.tree["offset"]
        self.tail: list[mx.array] = list(step.tree["tails"][place])
        self._place = place
        self._is_latent = cache.reads is Reads.LATENT
        self._class = step.layout.window_classes.index(cache.window)
        self._new: KV | None = None  # what the model was given, also for layers that borrow it

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = self.layer_cache.kept(keys, values)
        tail = self.tail[0], self.tail[1]
        self.tail = list(with_columns(tail, keys, values, self.step.tree["cursor"]))
        if self.layer_cache.splits:
            return self._handed_out(keys, values)
        self._new = self._joined(0), self._joined(1)
        self.keys, self.values = self._new  # mlx-lm's names: a model may read and replace them
        return self._new

    def keys_and_values(self) -> tuple[LentArray, LentArray]:
        assert self._new is not None, "no layer has written this cache yet"
        return lend(self._new, self.offset + 1)

    def _handed_out(self, keys: mx.array, values: mx.array) -> KV:
        """Not looked at: attention reads the view itself, which is found by these if lent."""
        self._new = keys, values
        self.step.lenders[id(keys)] = self
        return keys, _identity(values.shape[-1], keys.dtype) if self._is_latent else values

    def lends(self, keys: mx.array) -> bool:
        """Whether these are what `update_and_fetch` returned."""
        return self._new is not None and keys is self._new[0]

    def make_mask(
        self,
        N: int,  # noqa: N803 (mlx-lm's name)
        return_array: bool = False,
        window_size: int | None = None,
    ) -> Any:
        if self._is_latent:
            return None
        window = window_size or self.layer_cache.window
        if self.step.layout.splits:
            return RowMask(window, self.step)
        # The model may pass it to layers that attend in their own way, too.
        mask = self.step.mask(self.layer_cache, window)
        self.step.given.append(mask[:, None] if self.step.layout.groups_heads else mask)
        return self.step.given[-1]

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """`mask`: that some layer's view has made; of latents the rotated queries, scaled, [width,
        heads, 1, dim]."""
        if self._is_latent:
            values = self._joined(0)
            keys = mx.concatenate([values, self._joined(1)], axis=-1)
            queries = mx.concatenate([queries * scale, mask.astype(queries.dtype)], axis=-1)
            mask, scale = self.step.mask(self.layer_cache, self.layer_cache.window), 1.0
            return mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        if isinstance(mask, RowMask):
            mask = self.step.mask(self.layer_cache, mask.window)
        elif not any(mask is given for given in self.step.given):
            raise TypeError(WITHOUT_ITS_MASK)
        if mask.ndim == 5:  # made for layers that group heads
            mask = mask[:, 0]
        keys, values = self._joined(0), self._joined(1)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def positions(self) -> mx.array:
        """Of each column of joined KV, int32 [width, columns]; -1 where it is no token's."""
        return self.step.columns(self._class)[1]

    def _joined(self, side: int) -> mx.array:
        """[width, heads, columns of the longest row and of the tail, dim]"""
        parts = [pair[side] for pair in self.step.tree["mains"][self._place]]
        if not parts:
            return self.tail[side]
        at, _ = self.step.columns(self._class)
        return mx.concatenate([gathered(parts, at), self.tail[side]], axis=2)


def reads_table(layout: Layout) -> bool:
    """Whether there is the operation, and it takes what layers keep."""
    return layout.fits_table and operations() is not None


class TableRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        assert self._new is not None
        keys, values = self._new
        given = [*self.tail, keys.astype(mx.float32), values.astype(mx.float32)]
        given += [self.step.tree["cursor"], queries.astype(mx.float32), self.step.tree["kv_table"]]
        given += [] if sinks is None else [sinks.astype(mx.float32)]
        out: mx.array
        *self.tail, out = operations().row_attention(given, scale, self._place, mask.window or 0)
        return out.astype(queries.dtype)


class PackedRowKV(RowKV):
    """Keys and values of the step go into the tail where attention is computed."""

    def __init__(self, step: DecodeStep, cache: LayerCache, place: int) -> None:
        super().__init__(step, cache, place)
        self._segments = [(keys, values) for keys, values in step.tree["mains"][place]]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._handed_out(keys, values)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        assert self._new is not None
        (k, v), q, rotated = self._new, queries, None
        if self._is_latent:
            rotated, v, ropes = what_is_left(mask, v)
            rotated = rotated.astype(q.dtype)
        else:
            assert mask.window == self.layer_cache.window, "a kernel sees what its layer keeps"
            q, k, ropes = what_is_left(q, k)
        shape = self.step.shape.mains
        assert shape is not None
        assert shape.paths.kernel is not None
        call = PackedCall(
            q,
            k,
            v,
            (self.tail[0], self.tail[1]),
            self._segments,
            *self.step.packed(self._class),
            self.step.tree["cursor"],
            scale,
            sinks,
            shape.longest[self._class],
            self.offset,
            ropes,
            rotated,
        )
        out, *self.tail = shape.paths.kernel(call)
        return out


@cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    """Made once: every step would make it again."""
    identity = mx.eye(size, dtype=dtype)[None, None]
    mx.eval(identity)
    return identity
