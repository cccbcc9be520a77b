"""How KV cells and state slots share one memory: their sizes, and views of both. Allocates nothing.

    memory   [ slab 0 | slab 1 | slab 2 | ... ]      a slab holds one state, or many cells
    cell     KV of one token for all layers that attend to every token, or all with a window, one
             behind the other: [key or value, head, channel] each, of its own size
    state    for all recurrent layers:                  [recurrent | last inputs of the convolution]

Slab 0 is never written: a request that begins reads its zeros as its state, and padding reads its
cells. Slab 1 is waste: padding writes there, and no row reads it. So no state has to be
cleared, and no clearing can come too early or too late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from pippin.backends.torch.shapes import CellShape, ModelShape
from pippin.types import Component, LayerSpec, ModelSpec

ZERO_SLAB, WASTE_SLAB, FIRST_SLAB = 0, 1, 2
CELLS_WITHOUT_STATES = 256  # of a slab, where there is no state to make room for
LEAST_CELLS = 32  # of a slab, where states are small
KV_KINDS = (Component.ATTENTION, Component.WINDOW)


@dataclass(frozen=True)
class PoolLayout:
    shape: ModelShape
    dtype: torch.dtype

    def cell_bytes(self, kind: Component) -> int:
        """0 where a model has no such layers."""
        return self._cell_bytes.get(kind, 0)

    @cached_property
    def _cell_bytes(self) -> dict[Component, int]:
        return {kind: sum(map(self._kv_bytes, self._attending(kind))) for kind in KV_KINDS}

    def cell_shape(self, kind: Component) -> tuple[int, ...]:
        """[layers, parts of each]; where layers differ, [elements]."""
        parts = [mixer.kv_parts for mixer in self._attending(kind)]
        if len(set(parts)) == 1:
            return (len(parts), *parts[0])
        return (sum(map(math.prod, parts)),)

    def _attending(self, kind: Component) -> list[CellShape]:
        """The layers of a kind."""
        wanted = (layer.mixer for layer in self.shape.layers if layer.kind is kind)
        return [mixer for mixer in wanted if isinstance(mixer, CellShape)]

    def _kv_bytes(self, mixer: CellShape) -> int:
        return math.prod(mixer.kv_parts) * self._item_bytes

    @property
    def _item_bytes(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def kv_layer_bytes(self) -> int:
        """Of a token in the largest layer that attends."""
        every = (mixer for kind in KV_KINDS for mixer in self._attending(kind))
        return max(map(self._kv_bytes, every), default=0)

    @cached_property
    def num_recurrent_layers(self) -> int:
        return sum(layer.kind is Component.STATE for layer in self.shape.layers)

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        recurrent = self.shape.recurrent
        return (0, 0, 0) if recurrent is None else recurrent.state_parts

    @cached_property
    def conv_shape(self) -> tuple[int, int]:
        """The last inputs, oldest first."""
        recurrent = self.shape.recurrent
        return (0, 0) if recurrent is None else (recurrent.num_taps - 1, recurrent.num_channels)

    @property
    def _recurrent_bytes(self) -> int:
        return math.prod(self.recurrent_shape) * 4

    @property
    def _conv_bytes(self) -> int:
        return math.prod(self.conv_shape) * self._item_bytes

    @property
    def kept_width(self) -> int:
        """Of what is kept of a draft in each recurrent layer: the inputs of its convolution and of
        its gates."""
        recurrent = self.shape.recurrent
        return 0 if recurrent is None else recurrent.num_channels + recurrent.num_gates

    def kept_bytes(self, max_depth: int) -> int:
        """Of one slot, for its drafts."""
        return max_depth * self.num_recurrent_layers * self.kept_width * self._item_bytes

    def cells_per_slab(self, kind: Component) -> int:
        nbytes = self.cell_bytes(kind)
        return self.slab_bytes // nbytes if nbytes else 0

    @cached_property
    def slab_bytes(self) -> int:
        """Whole cells of every kind, and a state if there are any."""
        state = self.num_recurrent_layers * (self._recurrent_bytes + self._conv_bytes)
        sizes = [size for kind in KV_KINDS if (size := self.cell_bytes(kind))]
        cells = LEAST_CELLS if state else CELLS_WITHOUT_STATES
        least = max(state, cells * max(sizes, default=0))
        unit = math.lcm(*sizes) if sizes else 256
        return -(-least // unit) * unit

    @property
    def state_bytes(self) -> int:
        """Of a slab that holds a state: what rounding up to whole cells adds counts as its own."""
        return self.slab_bytes if self.num_recurrent_layers else 0

    def row_bytes(self, num_tokens: int, num_newest: int) -> int:
        """Of a row's own: beside what it sees of a window, so many more may be there."""
        windowed = min(num_tokens, self.shape.window + num_newest)
        return (
            num_tokens * self.cell_bytes(Component.ATTENTION)
            + windowed * self.cell_bytes(Component.WINDOW)
            + self.state_bytes
        )

    @cached_property
    def waste_cell(self) -> int:
        return WASTE_SLAB * self.cells_per_slab(Component.ATTENTION)

    def model_spec(self, name: str, max_len: int) -> ModelSpec:
        return ModelSpec(
            name=name,
            vocab_size=self.shape.vocab_size,
            max_len=max_len,
            layers=self.layer_specs(),
            state_taps=True,
            hidden_bytes=self.shape.hidden * self._item_bytes,
        )

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        specs = []
        left = self.state_bytes
        num_left = self.num_recurrent_layers
        for index, layer in enumerate(self.shape.layers):
            if layer.kind is None:
                continue
            if isinstance(layer.mixer, CellShape):
                nbytes, window = self._kv_bytes(layer.mixer), layer.mixer.window
                specs.append(LayerSpec(index, layer.kind, nbytes, window or None))
                continue
            num_left -= 1
            own = self._recurrent_bytes + self._conv_bytes if num_left else left
            specs.append(LayerSpec(index, Component.STATE, own))
            left -= own
        return tuple(specs)

    def kv(self, memory: torch.Tensor, kind: Component) -> list[torch.Tensor]:
        """Of each layer of a kind [cells, 2, heads, channels]; of latent attention [cells, 1, 1,
        channels]."""
        layers = self._attending(kind)
        if not layers:
            return []
        cells = memory.view(self.dtype).view(-1, self.cell_bytes(kind) // self._item_bytes)
        parts = cells.split([math.prod(layer.kv_parts) for layer in layers], dim=1)
        return [
            part.unflatten(1, layer.kv_parts) for part, layer in zip(parts, layers, strict=True)
        ]

    def recurrent(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Of each recurrent layer, float32 [slabs, heads, keys, values]."""
        return self._state_views(memory.view(torch.float32), 0, self.recurrent_shape)

    def conv(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Of each recurrent layer [slabs, taps - 1, channels]."""
        start = self.num_recurrent_layers * self._recurrent_bytes // self._item_bytes
        return self._state_views(memory.view(self.dtype), start, self.conv_shape)

    def _state_views(
        self, memory: torch.Tensor, start: int, shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Of each recurrent layer a part of this shape, from `start` on in every slab."""
        slabs, size = memory.view(-1, self.slab_bytes // memory.itemsize), math.prod(shape)
        starts = (start + layer * size for layer in range(self.num_recurrent_layers))
        return [slabs[:, first : first + size].unflatten(1, shape) for first in starts]
