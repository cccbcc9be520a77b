"""A few layers of a model with rows of noise, one token or one chunk before their next.

Imports no kernels, and judges nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
import torch

from pippin.backends.base import PrefillRow
from pippin.backends.torch.models.decoder import Decoder, DecoderLayer
from pippin.backends.torch.models.parts import DenseMlp, ExpertMlp, Linear, Mlp
from pippin.backends.torch.pools.layout import PoolLayout
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.shapes import AttentionShape, DenseShape, LayerShape
from pippin.backends.torch.step.batches import TakenChunks, take_chunks
from pippin.backends.torch.step.decode_inputs import RowArrays
from pippin.types import GRID, Component

KINDS: dict[str, Callable[[LayerShape], bool]] = {
    "attention": lambda layer: layer.kind is Component.ATTENTION and not _window_of(layer),
    "windows": lambda layer: layer.kind is Component.ATTENTION and _window_of(layer) > 0,
    "recurrent layers": lambda layer: layer.kind is Component.STATE,
}
LENGTHS = (GRID + 6, 3, 17)  # tokens that rows hold
# A row's first new token, and how many there are: of two blocks behind others, of few, of a fresh
# row. The first row's state is kept between its blocks, too.
CHUNKS = ((GRID + 9, GRID + 6), (5, 2), (0, 40))


def _window_of(layer: LayerShape) -> int:
    return layer.mixer.window if isinstance(layer.mixer, AttentionShape) else 0


def few_layers(decoder: Decoder) -> dict[str, Decoder]:
    """A layer of each kind, by its name; experts, which are tried alone, are one dense layer.

    Rows hold cells in every model, so a recurrent layer has one of attention behind it.
    """
    found: dict[str, Decoder] = {}
    behind: tuple[tuple[LayerShape, DecoderLayer], ...] = ()
    every = tuple(zip(decoder.shape.layers, decoder.layers, strict=True))
    for name, is_one in KINDS.items():
        first = next((pair for pair in every if is_one(pair[0])), None)
        if first is not None:
            shape, layer = first
            dense = None if layer.mlp is None else DenseShape(0)  # its size is its weights'
            alone = replace(layer, number=0, mlp=_dense(layer.mlp))
            is_recurrent = shape.kind is Component.STATE
            kept = ((replace(shape, mlp=dense), alone), *(behind if is_recurrent else ()))
            shapes, layers = zip(*kept, strict=True)
            found[name] = replace(
                decoder, shape=replace(decoder.shape, layers=shapes), layers=layers
            )
            behind = behind or kept
    return found


def _dense(mlp: Mlp | None) -> Mlp | None:
    if isinstance(mlp, ExpertMlp):
        return DenseMlp(Linear(mlp.gate_up[0]), Linear(mlp.down[0]), mlp.shape.activation)
    return mlp


def lengths_of(num_rows: int) -> tuple[int, ...]:
    return tuple(islice(cycle(LENGTHS), num_rows))


class NoisyRows:
    """Slots 1, 2 ... that hold so many tokens of noise.

    Cells and states share one memory in numbers of different sizes: noise is written where a slot
    holds it, as what is read there.
    """

    def __init__(self, decoder: Decoder, lengths: tuple[int, ...]) -> None:
        layout = PoolLayout(decoder.shape, decoder.dtype)
        num_cells = sum(lengths) + sum(new for _, new in CHUNKS) + len(lengths)
        num_cell_slabs = -(-num_cells // layout.cells_per_slab(Component.ATTENTION))
        num_slabs = len(lengths) + 2 * len(CHUNKS) + num_cell_slabs + 2
        self.pools = Pools(layout, num_slabs * layout.slab_bytes, decoder.device)
        self.pools.memory.zero_()
        self._generator = torch.Generator(decoder.device).manual_seed(0)
        self.rows = Rows(self.pools, len(lengths), 4 * GRID)
        self.slots = np.arange(1, len(lengths) + 1)
        for slot, length in zip(self.slots.tolist(), lengths, strict=True):
            self.rows.grow(slot, length)
            if length:
                self.rows.next_states(np.array([slot]))
                self._fill(slot, length)

    def _fill(self, slot: int, length: int) -> None:
        pools = self.pools
        cells, states = self.rows.held(slot, 0, length), self.rows.states[[slot]]
        for views, places in ((pools.kv, cells), ((*pools.recurrent, *pools.conv), states)):
            where = pools.index(places)
            for view in views:
                view[where] = torch.empty_like(view[where]).normal_(generator=self._generator)

    def written(self, cells: torch.Tensor, states: torch.Tensor) -> list[torch.Tensor]:
        """What a forward left in the pools."""
        pools = self.pools
        found = [view[cells] for view in pools.kv]
        return found + [view[states] for view in (*pools.recurrent, *pools.conv)]


def noisy_step(decoder: Decoder, num_rows: int) -> tuple[NoisyRows, RowArrays]:
    """Rows that run one token each."""
    held = NoisyRows(decoder, lengths_of(num_rows))
    positions = held.rows.lengths[held.slots].copy()
    cells = held.rows.grow_each(held.slots, positions)
    return held, RowArrays(held.slots, positions, cells, *held.rows.next_states(held.slots))


def noisy_chunks(decoder: Decoder) -> tuple[NoisyRows, TakenChunks]:
    held = NoisyRows(decoder, tuple(start for start, _ in CHUNKS))
    rng = np.random.default_rng(0)
    chunks = [
        PrefillRow(
            slot,
            start,
            rng.integers(0, decoder.shape.vocab_size, new).astype(np.int32),
            captures=True,
            checkpoints=(start + GRID,) if new > GRID else (),
        )
        for slot, (start, new) in enumerate(CHUNKS, start=1)
    ]
    return held, take_chunks(chunks, held.rows, held.pools)
