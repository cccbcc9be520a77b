"""Moves a row's cache between per-layer arrays and the payloads that the prefix cache keeps.

Attention layers of one shape are stacked, so that a block of 64 tokens is two arrays and not two
per layer: few live buffers, and one operation, not one per layer, when a prefix is restored.
Recurrent states are few and large, and stay the arrays that the layers made: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import mlx.core as mx

from pippin.backends.base import Load, Spill
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.payload import (
    Block,
    KVPayload,
    LiveBuffers,
    Span,
    StatePayload,
    spans_of,
)
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import GRID, Component, Payload

LONG_PREFIX_BYTES = 32 << 20
RESTORED_PARTS = 8  # in which a long prefix is restored

KV = tuple[mx.array, mx.array]  # keys, values: [rows, heads, tokens, dim]


class Packer:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.buffers = LiveBuffers()
        # KV caches that are stacked, in the order of a block's arrays.
        self.groups: dict[Component, Sequence[tuple[int, ...]]] = {
            component: _alike(layout, layout.indices(component))
            for component in (Component.ATTENTION, Component.WINDOW)
            if layout.indices(component)
        }

    @property
    def least_buffer_bytes(self) -> int:
        """Of a payload's buffers, on average: a KV block has one token at least."""
        caches = self._layout.caches
        averages = []
        for groups in self.groups.values():
            token_bytes = sum(caches[cache].nbytes for group in groups for cache in group)
            averages.append(token_bytes // (2 * len(groups)))
        states = [caches[cache] for cache in self._layout.state_indices]
        if states:
            num_arrays = sum(len(cache.shapes) for cache in states)
            averages.append(sum(cache.nbytes for cache in states) // num_arrays)
        return min(averages)

    def kv_payload(
        self, component: Component, kv: Mapping[int, KV], row: int, start: int, stop: int
    ) -> KVPayload:
        """Copy tokens [start, stop) of one row out of per-cache arrays, GRID tokens at a time."""
        return self.in_blocks(
            start,
            stop,
            lambda at, end: [
                _copied([kv[cache][side][row, :, at:end] for cache in group])
                for group in self.groups[component]
                for side in (0, 1)
            ],
        )

    def in_blocks(
        self, start: int, stop: int, arrays_of: Callable[[int, int], Sequence[mx.array]]
    ) -> KVPayload:
        """Tokens [start, stop), GRID at a time, each block of the arrays of its tokens."""
        spans = []
        for at in range(start, stop, GRID):
            end = min(at + GRID, stop)
            block = self.buffers.counted(Block(tuple(arrays_of(at, end)), end - at))
            spans.append(Span(block, 0, end - at))
        return KVPayload(tuple(spans))

    def kv_arrays(self, component: Component, payloads: Sequence[Payload]) -> dict[int, KV]:
        """Per-cache [1, heads, tokens, dim] arrays of consecutive payloads: one copy of each.

        Caches that are stacked share a buffer, which lives until the last of them has been used:
        those of a long prefix are restored a few at a time.
        """
        spans = [span for payload in payloads for span in spans_of(payload)]
        columns = list(zip(*(span.arrays() for span in spans), strict=True))
        is_long = sum(payload.nbytes for payload in payloads) > LONG_PREFIX_BYTES
        kv: dict[int, KV] = {}
        for number, group in enumerate(self.groups[component]):
            step = -(-len(group) // RESTORED_PARTS) if is_long else len(group)
            for first in range(0, len(group), step):
                part = group[first : first + step]
                keys, values = (
                    _joined(columns[2 * number + side], first, first + len(part)) for side in (0, 1)
                )
                for place, cache in enumerate(part):
                    kv[cache] = (keys[place][None], values[place][None])
        return kv

    def state_payload(
        self,
        states: Mapping[int, Sequence[mx.array]],
        row: int,
        *,
        column_major: bool = False,
    ) -> StatePayload:
        """One row's recurrent states, layer by layer; of a row by itself, the very arrays given.

        `column_major`: the last entry of each layer lies transposed, and is copied as it lies.
        """
        arrays = []
        for cache in self._layout.state_indices:
            last = len(states[cache]) - 1
            for number, entry in enumerate(states[cache]):
                if entry.shape[0] == 1:
                    arrays.append(entry)
                elif column_major and number == last:
                    turned = mx.contiguous(entry[row : row + 1].swapaxes(-1, -2))
                    arrays.append(turned.swapaxes(-1, -2))
                else:
                    arrays.append(mx.contiguous(entry[row : row + 1]))
        return self.buffers.counted(StatePayload(tuple(arrays)))

    def hidden_payload(self, hidden: mx.array, row: int) -> StatePayload:
        """`hidden` [rows, 1, hidden]"""
        return self.buffers.counted(StatePayload((mx.contiguous(hidden[row : row + 1]),)))

    def state_arrays(self, payload: Payload) -> dict[int, list[mx.array]]:
        """Per-cache entries [1, ...] of a state payload."""
        assert isinstance(payload, StatePayload)
        arrays = iter(payload.arrays)
        # In one memory order, like a state that is carried on: the same to the last bit.
        return {
            cache: [mx.contiguous(next(arrays)) for _ in self._layout.caches[cache].shapes]
            for cache in self._layout.state_indices
        }


def _joined(blocks: Sequence[mx.array], first: int, last: int) -> mx.array:
    """Some layers of consecutive blocks: [layers, heads, tokens, dim]."""
    whole = last - first == blocks[0].shape[0]
    layers = list(blocks) if whole else [block[first:last] for block in blocks]
    return mx.concatenate(layers, axis=2)


def payload_arrays(payload: Payload) -> tuple[mx.array, ...]:
    """Every array of a fresh payload, for the step's one `mx.async_eval`."""
    if isinstance(payload, StatePayload):
        return payload.arrays
    return tuple(array for span in spans_of(payload) for array in span.block.arrays)


def _copied(pieces: Sequence[mx.array]) -> mx.array:
    """Stacked in a buffer of their own; one piece alone would stay a view that holds its whole."""
    return mx.contiguous(pieces[0])[None] if len(pieces) == 1 else mx.stack(list(pieces))


def _alike(layout: Layout, indices: Sequence[int]) -> list[tuple[int, ...]]:
    groups: dict[object, list[int]] = {}
    for index in indices:
        cache = layout.caches[index]
        groups.setdefault((cache.shapes, cache.dtypes), []).append(index)
    return [tuple(group) for group in groups.values()]


class Transfers:
    """Payloads as bytes for another tier, and back.

    KV is laid out token by token, so that any run of tokens is one piece of memory and several
    entries become one payload with one copy:

        layers of one shape, keys like values   [tokens, layers, keys or values, heads, dim]
        otherwise keys and values by themselves [tokens, layers, heads, dim]

    Blocks of the prefix cache lie otherwise: the step that spills or loads them transposes them, in
    the order of all that steps do, and only the thread that writes waits for it.
    """

    def __init__(
        self, layout: Layout, packer: Packer, hidden_bytes: int, hidden_type: mx.Dtype
    ) -> None:
        """`hidden_bytes`: of what the head reads of one token, which are numbers of that type."""
        self._layout = layout
        self._packer = packer
        self._hidden = ArraySpec("hidden", _name(hidden_type), (hidden_bytes // hidden_type.size,))

    # ---- how bytes look --------------------------------------------------------------------

    def payload_arrays(self, component: Component, num_tokens: int) -> tuple[ArraySpec, ...]:
        if component is Component.STATE:
            return tuple(self._state_arrays())
        if component is Component.HIDDEN:
            return (self._hidden,)
        return tuple(self._kv_arrays(component, num_tokens))

    def _state_arrays(self) -> Iterator[ArraySpec]:
        for index in self._layout.state_indices:
            cache = self._layout.caches[index]
            for number, (shape, dtype) in enumerate(zip(cache.shapes, cache.dtypes, strict=True)):
                yield ArraySpec(f"{self._cache_name(index)}.state.{number}", _name(dtype), shape)

    def _kv_arrays(self, component: Component, num_tokens: int) -> Iterator[ArraySpec]:
        for group in self._packer.groups[component]:
            cache = self._layout.caches[group[0]]
            layers = ",".join(map(self._cache_name, group))
            (keys, values), (keys_type, values_type) = cache.shapes, cache.dtypes
            lead = (num_tokens, len(group))
            if _is_even(cache):
                yield ArraySpec(f"{layers}.kv", _name(keys_type), (*lead, 2, *keys), token_axis=0)
            else:
                yield ArraySpec(f"{layers}.keys", _name(keys_type), (*lead, *keys), token_axis=0)
                yield ArraySpec(
                    f"{layers}.values", _name(values_type), (*lead, *values), token_axis=0
                )

    def _cache_name(self, index: int) -> str:
        """The layer's number, with its cache's where it keeps several."""
        caches = self._layout.caches
        within = sum(cache.layer == caches[index].layer for cache in caches[:index])
        return f"{caches[index].layer}" + (f"+{within}" if within else "")

    # ---- towards the disk ------------------------------------------------------------------

    def gathered(self, spill: Spill) -> list[mx.array]:
        """Lazy: the step that spills evaluates what is in it."""
        if spill.component in (Component.STATE, Component.HIDDEN):
            (payload,) = spill.payloads
            assert isinstance(payload, StatePayload)
            return [_bytes(array) for array in payload.arrays]
        return [_bytes(array) for array in self._turned_out(spill)]

    def _turned_out(self, spill: Spill) -> Iterator[mx.array]:
        spans = [span for payload in spill.payloads for span in spans_of(payload)]
        columns = list(zip(*(span.arrays() for span in spans), strict=True))
        for number, group in enumerate(self._packer.groups[spill.component]):
            cache = self._layout.caches[group[0]]
            sides = [
                mx.concatenate([part.transpose(2, 0, 1, 3) for part in columns[2 * number + side]])
                for side in (0, 1)
            ]
            if _is_even(cache):
                yield mx.stack(sides, axis=2)
            else:
                yield from sides

    # ---- and back --------------------------------------------------------------------------

    def load(self, load: Load) -> Payload:
        """One copy of the bytes; the payload's arrays are cut out of it by the step."""
        specs = self.payload_arrays(load.component, load.num_tokens)
        arrays = [_array(spec, data) for spec, data in zip(specs, load.arrays, strict=True)]
        if load.component is Component.STATE:
            arrays = [array[None] for array in arrays]
            return self._packer.buffers.counted(StatePayload(tuple(arrays)))
        if load.component is Component.HIDDEN:
            return self._packer.buffers.counted(StatePayload((arrays[0][None, None],)))
        sides = [side.transpose(1, 2, 0, 3) for side in self._sides(load.component, arrays)]
        return self._packer.in_blocks(
            0,
            load.num_tokens,
            lambda at, end: [mx.contiguous(side[:, :, at:end]) for side in sides],
        )

    def _sides(self, component: Component, arrays: Sequence[mx.array]) -> Iterator[mx.array]:
        """Keys and values of each group, [tokens, layers, heads, dim]."""
        rest = iter(arrays)
        for group in self._packer.groups[component]:
            cache = self._layout.caches[group[0]]
            if _is_even(cache):
                both = next(rest)
                yield from (both[:, :, 0], both[:, :, 1])
            else:
                yield from (next(rest), next(rest))


def _is_even(cache: LayerCache) -> bool:
    """Keys look like values."""
    return len(set(cache.shapes)) == len(set(cache.dtypes)) == 1


def _bytes(array: mx.array) -> mx.array:
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def _array(spec: ArraySpec, data: Bytes) -> mx.array:
    dtype: mx.Dtype = getattr(mx, spec.dtype)
    return mx.array(data).view(dtype).reshape(spec.shape)


def _name(dtype: mx.Dtype) -> str:
    """As numpy and torch call it."""
    return str(dtype).rpartition(".")[2]
