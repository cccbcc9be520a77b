"""Payloads as bytes for another tier, and back. Knows the layout; knows no prefix cache.

KV is laid out token by token, so that any run of tokens is one piece of memory and several entries
become one payload with one copy:

    layers of one shape, keys like values   [tokens, layers, keys or values, heads, dim]
    otherwise keys and values by themselves [tokens, layers, heads, dim]

Blocks of the prefix cache lie otherwise: the step that spills or loads them transposes them, in the
order of all that steps do, and only the thread that writes waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx

from pippin.backends.base import Load, Spill
from pippin.backends.mlx.layout import LayerCache, Layout
from pippin.backends.mlx.payloads.packing import Packer
from pippin.backends.mlx.payloads.payload import StatePayload, spans_of
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, Payload


class Transfers:
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
