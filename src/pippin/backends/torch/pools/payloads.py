"""What the tree keeps for torch: cells of the KV pool, a state slot, a hidden vector.

A payload holds what it names: it is not reused before the payload is released. Splitting is
arithmetic on the host. Nothing is copied to make a payload, nor to restore from one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from pippin.backends.base import Load, Spill
from pippin.backends.step.fingerprints import Prints
from pippin.backends.torch.pools.layout import KV_KINDS, PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.streams import Arrival, Streams
from pippin.cache.entries import ArraySpec, Bytes
from pippin.types import Component, Payload


class KVPayload:
    """Consecutive tokens, in cells of one kind."""

    def __init__(
        self, pools: Pools, kind: Component, cells: np.ndarray, prints: Prints | None = None
    ) -> None:
        self._pools = pools
        self._pool = pools.arena.cells[kind]
        self.kind = kind
        self._cells = cells  # int32, held
        self._parts: tuple[KVPayload, ...] = ()  # its halves, once it was split
        self.prints = prints or Prints()  # int64, of each cell's bytes
        self.num_tokens = len(cells)
        self.nbytes = len(cells) * pools.layout.cell_bytes(kind)
        self._pool.add_holder(self, cells)

    @classmethod
    def of(cls, pools: Pools, kind: Component, cells: np.ndarray) -> KVPayload:
        """One more holder of cells."""
        pools.arena.cells[kind].retain(cells)
        return cls(pools, kind, cells.copy())

    @property
    def cells(self) -> np.ndarray:
        if self._parts:  # a plan read it before it was split
            return np.concatenate([part.cells for part in self._parts])
        return self._cells

    def move(self, new_cells: np.ndarray) -> None:
        self._pool.drop_holder(self, self._cells)
        self._cells = new_cells[self._cells]
        self._pool.add_holder(self, self._cells)

    def split(self, at: int) -> tuple[Payload, Payload]:
        self._pool.drop_holder(self, self._cells)
        head, tail = (
            KVPayload(self._pools, self.kind, self._cells[start:end], self.prints.part(start, end))
            for start, end in ((0, at), (at, self.num_tokens))
        )
        self._parts = (head, tail)
        return head, tail

    def release(self) -> None:
        self._pool.drop_holder(self, self._cells)
        self._pool.release(self._cells)

    def fingerprint(self) -> int:
        with self._pools.forward():  # behind the launches that write it
            return _crc(self._pools.cell_bytes(self.kind, self.cells))


class _PointPayload:
    """What belongs to one position."""

    num_tokens = 1

    def __init__(self, pools: Pools, nbytes: int) -> None:
        self._pools = pools
        self.nbytes = nbytes
        self.prints = Prints()  # int64, of its bytes

    def split(self, at: int) -> tuple[Payload, Payload]:
        raise TypeError("what belongs to one position cannot be divided")


class StatePayload(_PointPayload):
    """The state slot after one position."""

    def __init__(self, pools: Pools, slab: int) -> None:
        """Takes over one hold of the slot."""
        super().__init__(pools, pools.layout.state_bytes)
        self.slab = slab

    @classmethod
    def of(cls, pools: Pools, slab: int) -> StatePayload:
        """One more holder: from now on none may write it."""
        pools.arena.hold_state(slab)
        return cls(pools, slab)

    def release(self) -> None:
        self._pools.arena.release_state(self.slab)

    def fingerprint(self) -> int:
        with self._pools.forward():
            return _crc(self._pools.state_bytes(self.slab))


class HiddenPayload(_PointPayload):
    """What the head reads after one position: a tensor of its own, a few kilobytes."""

    def __init__(self, pools: Pools, hidden: torch.Tensor) -> None:
        super().__init__(pools, hidden.nbytes)
        self.hidden: torch.Tensor | None = hidden  # [hidden]

    def release(self) -> None:
        self.hidden = None

    def fingerprint(self) -> int:
        assert self.hidden is not None
        with self._pools.forward():
            return _crc(self.hidden.contiguous().view(torch.uint8))


def _crc(content: torch.Tensor) -> int:
    return zlib.crc32(content.cpu().contiguous().numpy().tobytes())


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
    """Payloads as bytes on their way to another tier, and back.

        spill   one gather out of the pools, in the order of launches; then the copy stream's work
        load    one copy to the device, beside the step's forwards, and one scatter into cells
                behind them, for however many entries it came from

    The bytes are those that mlx writes: a cell lies as they do, a recurrent state is turned.
    """

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
