"""The memory itself: views of KV and states, layer by layer, and the cells' moves."""

from __future__ import annotations

import numpy as np
import torch

from pippin.backends.torch.pools.arena import Arena
from pippin.backends.torch.pools.layout import FIRST_SLAB, KV_KINDS, ZERO_SLAB, PoolLayout
from pippin.types import Component


class Pools:
    """One tensor; `kv`, `window_kv`, `recurrent` and `conv` are views of it, one for each layer of
    the kind."""

    def __init__(self, layout: PoolLayout, capacity_bytes: int, device: torch.device) -> None:
        kinds = [kind for kind in KV_KINDS if layout.cell_bytes(kind)]
        # Of each further kind of cells one slab may be all but empty.
        spare = FIRST_SLAB + max(len(kinds) - 1, 0)
        num_slabs = spare + max(-(-capacity_bytes // layout.slab_bytes), 1)
        self.layout = layout
        self.device = device
        # Not touched before it is used: on CPUs what nobody uses takes no memory.
        self.memory = torch.empty(num_slabs * layout.slab_bytes, dtype=torch.uint8, device=device)
        self._slab(ZERO_SLAB).zero_()
        self.arena = Arena(layout, num_slabs, self._move_cells)
        self.kv = layout.kv(self.memory, Component.ATTENTION)
        self.window_kv = layout.kv(self.memory, Component.WINDOW)
        self.recurrent = layout.recurrent(self.memory) if layout.num_delta_layers else []
        self.conv = layout.conv(self.memory) if layout.num_delta_layers else []

    @property
    def capacity_bytes(self) -> int:
        return (self.arena.num_slabs - FIRST_SLAB) * self.layout.slab_bytes

    def index(self, values: np.ndarray) -> torch.Tensor:
        """int64, on the device, for indexing; the host does not wait."""
        host = torch.from_numpy(values.astype(np.int64))
        if self.device.type == "cpu":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def cell_bytes(self, kind: Component, cells: np.ndarray) -> torch.Tensor:
        """A copy, uint8 [cells, bytes]."""
        return self._cells(kind)[self.index(cells)].view(torch.uint8)

    def set_cells(self, kind: Component, cells: np.ndarray, content: torch.Tensor) -> None:
        """One scatter. `content`: as many bytes as these cells have, cell by cell."""
        held = self._cells(kind)
        held[self.index(cells)] = content.reshape(len(cells), -1).view(held.dtype)

    def state_bytes(self, slab: int) -> torch.Tensor:
        return self._slab(slab)

    def _cells(self, kind: Component) -> torch.Tensor:
        """[cells, words]: the wider a word, the fewer are moved one by one."""
        nbytes = self.layout.cell_bytes(kind)
        words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
        word = next(word for size, word in words.items() if nbytes % size == 0)
        return self.memory.view(-1, nbytes).view(word)

    def _slab(self, slab: int) -> torch.Tensor:
        size = self.layout.slab_bytes
        return self.memory[slab * size : (slab + 1) * size]

    def _move_cells(self, kind: Component, old: np.ndarray, new: np.ndarray) -> None:
        cells = self._cells(kind)
        cells[self.index(new)] = cells[self.index(old)]
