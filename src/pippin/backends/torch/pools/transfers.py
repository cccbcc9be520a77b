"""Payloads as bytes on their way to another tier, and back. Knows pools; knows no tree.

    spill   one gather out of the pools, in the order of launches; then the copy stream's business
    load    one copy to the device, beside the step's forwards, and one scatter into cells behind
            them, for however many entries it came from

The bytes are those that mlx writes: a cell lies as they do, a recurrent state is turned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Load, Spill
from pippin.backends.torch.pools.layout import KV_KINDS, PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.payloads import HiddenPayload, KVPayload, StatePayload
from pippin.backends.torch.streams import Arrival, Streams
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, Payload


def payload_arrays(
    layout: PoolLayout, component: Component, num_tokens: int
) -> tuple[ArraySpec, ...]:
    shape, dtype = layout.shape, str(layout.dtype).rpartition(".")[2]
    if component is Component.HIDDEN:
        return (ArraySpec("hidden", dtype, (shape.hidden,)),)
    if component in KV_KINDS:
        layers = [str(i) for i, layer in enumerate(shape.layers) if layer.kind is component]
        parts = (num_tokens, *layout.cell_shape(component))
        return (ArraySpec(f"{','.join(layers)}.kv", dtype, parts, token_axis=0),)
    assert component is Component.STATE
    heads, k_dim, v_dim = layout.recurrent_shape
    specs: list[ArraySpec] = []
    for index, layer in enumerate(shape.layers):
        if layer.kind is Component.STATE:
            specs.append(ArraySpec(f"{index}.state.0", dtype, layout.conv_shape))
            if heads:
                specs.append(ArraySpec(f"{index}.state.1", "float32", (heads, v_dim, k_dim)))
    return tuple(specs)


def host_memory(device: torch.device, nbytes: int) -> Bytes:
    """Pinned where there is a device to send from it: then a copy need not be waited for."""
    held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory: Bytes = held.numpy()
    return memory


class Transfers:
    def __init__(self, pools: Pools, streams: Streams) -> None:
        self._pools = pools
        self._streams = streams

    def gathered(self, spill: Spill) -> list[torch.Tensor]:
        """Of uint8. Copies: pools are written in place."""
        pools = self._pools
        if spill.component in KV_KINDS:
            cells = [payload.cells for payload in spill.payloads if isinstance(payload, KVPayload)]
            return [pools.cell_bytes(spill.component, np.concatenate(cells))]
        (payload,) = spill.payloads
        if isinstance(payload, HiddenPayload):
            assert payload.hidden is not None
            return [_as_bytes(payload.hidden)]
        assert isinstance(payload, StatePayload)
        found: list[torch.Tensor] = []
        for conv, recurrent in zip(pools.conv, pools.recurrent, strict=True):
            found.append(conv[payload.slab].clone())
            if recurrent.numel():
                found.append(recurrent[payload.slab].transpose(-1, -2))
        return list(map(_as_bytes, found))

    def send(self, loads: Sequence[Load]) -> list[Arrival]:
        """Before a step's forwards: when these have run, the bytes are there."""
        return [self._streams.send([torch.from_numpy(a) for a in load.arrays]) for load in loads]

    def load(self, loads: Sequence[Load], sent: Sequence[Arrival]) -> list[Payload]:
        """What `send` sent, behind them."""
        cells = {
            kind: sum(load.num_tokens for load in loads if load.component is kind)
            for kind in KV_KINDS
        }
        states = sum(load.component is Component.STATE for load in loads)
        self._pools.arena.make_room_for(cells, states)
        return [self._load(load, arrival) for load, arrival in zip(loads, sent, strict=True)]

    def _load(self, load: Load, arrival: Arrival) -> Payload:
        pools = self._pools
        specs = payload_arrays(pools.layout, load.component, load.num_tokens)
        arrived = zip(arrival.wait(), specs, strict=True)
        sent = [data.view(getattr(torch, spec.dtype)).view(spec.shape) for data, spec in arrived]
        if load.component in KV_KINDS:
            cells = pools.arena.cells[load.component].take(load.num_tokens)
            pools.set_cells(load.component, cells, sent[0])
            return KVPayload(pools, load.component, cells)
        if load.component is Component.HIDDEN:
            return HiddenPayload(pools, sent[0])
        slab = pools.arena.take_state()
        parts = iter(sent)
        for conv, recurrent in zip(pools.conv, pools.recurrent, strict=True):
            conv[slab] = next(parts)
            if recurrent.numel():
                recurrent[slab] = next(parts).transpose(-1, -2)
        return StatePayload(pools, slab)


def _as_bytes(found: torch.Tensor) -> torch.Tensor:
    return found.contiguous().view(-1).view(torch.uint8)
