"""The memory itself: views of KV and states, layer by layer, and the cells' moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from pippin.backends.torch.device import to_device
from pippin.backends.torch.pools.arena import Arena
from pippin.backends.torch.pools.layout import FIRST_SLAB, KV_KINDS, ZERO_SLAB, PoolLayout
from pippin.types import Component


def spare_slabs(layout: PoolLayout) -> int:
    """Beside those of its capacity. Of each further kind of cells one slab may be all but empty."""
    num_kinds = sum(layout.cell_bytes(kind) > 0 for kind in KV_KINDS)
    return FIRST_SLAB + max(num_kinds - 1, 0)


class Pools:
    """One tensor; `kv`, `window_kv`, `recurrent` and `conv` are views of it, one for each layer of
    the kind."""

    def __init__(
        self,
        layout: PoolLayout,
        capacity_bytes: int,
        device: torch.device,
        forward: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`forward`: where all that reads or writes the memory runs."""
        num_slabs = spare_slabs(layout) + max(-(-capacity_bytes // layout.slab_bytes), 1)
        self.layout = layout
        self.device = device
        self.forward = forward
        # Not touched before it is used: on CPUs unused memory takes none.
        self.memory = torch.empty(num_slabs * layout.slab_bytes, dtype=torch.uint8, device=device)
        self._slab(ZERO_SLAB).zero_()
        self.arena = Arena(layout, num_slabs, self._move_cells)
        self.kv = layout.kv(self.memory, Component.ATTENTION)
        self.window_kv = layout.kv(self.memory, Component.WINDOW)
        self.recurrent = layout.recurrent(self.memory) if layout.num_recurrent_layers else []
        self.conv = layout.conv(self.memory) if layout.num_recurrent_layers else []

    def free(self) -> None:
        """Frees the memory; its holders are still counted, until the last releases."""
        self.memory = self.memory.new_empty(0)
        for views in (self.kv, self.window_kv, self.recurrent, self.conv):
            views.clear()
        for pool in self.arena.cells.values():
            pool.drop_rows()

    @property
    def capacity_bytes(self) -> int:
        return (self.arena.num_slabs - FIRST_SLAB) * self.layout.slab_bytes

    def index(self, values: np.ndarray) -> torch.Tensor:
        """int64, on the device, for indexing; the host does not wait."""
        return to_device(values.astype(np.int64), self.device)

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


class KeptInputs:
    """Inputs of drafts, by slot, that recurrent layers run once they are accepted.

    A recurrent state is written after a step's input token, which is always accepted; of the drafts
    behind it the inputs of the convolution and of the gates are kept, a few kilobytes a layer. The
    next step of the row, or its capture, runs those that were accepted first.
    """

    def __init__(
        self, layout: PoolLayout, num_slots: int, max_depth: int, device: torch.device
    ) -> None:
        """Not touched before it is used: on CPUs unused memory takes none."""
        shape = (layout.num_recurrent_layers, num_slots + 1, max_depth, layout.kept_width)
        # [layers, slots, drafts, width]
        self.inputs = torch.empty(shape, dtype=layout.dtype, device=device)

    def keep(self, layer: int, slots: torch.Tensor, inputs: torch.Tensor) -> None:
        """Of the drafts of some rows: inputs [rows, drafts, width]."""
        self.inputs[layer][slots, : inputs.shape[1]] = inputs

    def of_layer(self, layer: int) -> torch.Tensor:
        """[slots, drafts, width]"""
        return self.inputs[layer]

    def of(self, layer: int, slots: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """[rows, num_drafts, width]; behind what is kept of a row it may be anything."""
        return self.inputs[layer][slots, :num_drafts]
