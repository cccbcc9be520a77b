"""What the tree keeps for torch: cells of the KV pool, a state slot, a hidden vector.

A payload holds what it names: it is not reused before the payload is released. Splitting is
arithmetic on the host. Nothing is copied to make a payload, nor to restore from one.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from pippin.backends.step.fingerprints import Prints
from pippin.backends.torch.pools.memory import Pools
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
