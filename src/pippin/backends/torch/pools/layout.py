"""How KV cells and state slots share one memory: their sizes, and views of both. Allocates nothing.

    memory   [ slab 0 | slab 1 | slab 2 | ... ]      a slab holds one state, or many cells
    cell     KV of one token for all layers that attend to every token, or all with a window:
             [layer, key or value, head, channel]
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

from pippin.backends.torch.config import LayerKind, ModelShape
from pippin.types import Component, LayerSpec, ModelSpec

ZERO_SLAB, WASTE_SLAB, FIRST_SLAB = 0, 1, 2
CELLS_WITHOUT_STATES = 256  # of a slab, where there is no state to make room for
KV_KINDS: dict[Component, LayerKind] = {
    Component.ATTENTION: "attention",
    Component.WINDOW: "window",
}


@dataclass(frozen=True)
class PoolLayout:
    shape: ModelShape
    dtype: torch.dtype

    def cell_bytes(self, kind: Component) -> int:
        """0 where a model has no such layers."""
        return self._num_layers(kind) * self.kv_layer_bytes

    def _num_layers(self, kind: Component) -> int:
        return self.shape.layers.count(KV_KINDS[kind])

    @property
    def _item_bytes(self) -> int:
        return int(self.dtype.itemsize)

    @property
    def kv_layer_bytes(self) -> int:
        return 2 * self.shape.num_kv_heads * self.shape.head_dim * self._item_bytes

    @property
    def num_delta_layers(self) -> int:
        return self.shape.layers.count("delta")

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        delta = self.shape.delta
        return (0, 0, 0) if delta is None else (delta.num_v_heads, delta.k_dim, delta.v_dim)

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The last inputs, oldest first."""
        delta = self.shape.delta
        return (0, 0) if delta is None else (delta.num_taps - 1, delta.num_channels)

    @property
    def _recurrent_bytes(self) -> int:
        return math.prod(self.recurrent_shape) * 4

    @property
    def _conv_bytes(self) -> int:
        return math.prod(self.conv_shape) * self._item_bytes

    @property
    def kept_width(self) -> int:
        """Of what is kept of a draft in each recurrent layer: the inputs of its convolution and of
        its two gates."""
        delta = self.shape.delta
        return 0 if delta is None else delta.num_channels + 2 * delta.num_v_heads

    def kept_bytes(self, max_depth: int) -> int:
        """Of one slot, for its drafts."""
        return max_depth * self.num_delta_layers * self.kept_width * self._item_bytes

    def cells_per_slab(self, kind: Component) -> int:
        nbytes = self.cell_bytes(kind)
        return self.slab_bytes // nbytes if nbytes else 0

    @cached_property
    def slab_bytes(self) -> int:
        """Whole cells of every kind, and a state if there are any."""
        state = self.num_delta_layers * (self._recurrent_bytes + self._conv_bytes)
        sizes = [size for kind in KV_KINDS if (size := self.cell_bytes(kind))]
        least = state or CELLS_WITHOUT_STATES * max(sizes)
        unit = math.lcm(*sizes) if sizes else 256
        return -(-least // unit) * unit

    @property
    def state_bytes(self) -> int:
        """Of a slab that holds a state: what rounding up to whole cells adds counts as its own."""
        return self.slab_bytes if self.num_delta_layers else 0

    def row_bytes(self, num_tokens: int, num_newest: int) -> int:
        """Of a row's own: beside what it sees of a window, so many more may be there."""
        windowed = min(num_tokens, self.shape.window + num_newest)
        return (
            num_tokens * self.cell_bytes(Component.ATTENTION)
            + windowed * self.cell_bytes(Component.WINDOW)
            + self.state_bytes
        )

    @property
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
        for index, kind in enumerate(self.shape.layers):
            if kind == "attention":
                specs.append(LayerSpec(index, Component.ATTENTION, self.kv_layer_bytes))
                continue
            if kind == "window":
                nbytes, window = self.kv_layer_bytes, self.shape.window
                specs.append(LayerSpec(index, Component.WINDOW, nbytes, window))
                continue
            is_last = "delta" not in self.shape.layers[index + 1 :]
            own = left if is_last else self._recurrent_bytes + self._conv_bytes
            specs.append(LayerSpec(index, Component.STATE, own))
            left -= own
        return tuple(specs)

    def kv(self, memory: torch.Tensor, kind: Component) -> list[torch.Tensor]:
        """Of each layer of a kind [cells, 2, heads, channels]."""
        layers = self._num_layers(kind)
        if not layers:
            return []
        parts = (layers, 2, self.shape.num_kv_heads, self.shape.head_dim)
        cells = memory.view(self.dtype).view(-1, *parts)
        return [cells[:, layer] for layer in range(layers)]

    def recurrent(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Of each recurrent layer, float32 [slabs, heads, keys, values]."""
        return self._state_views(memory.view(torch.float32), 0, self.recurrent_shape)

    def conv(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Of each recurrent layer [slabs, taps - 1, channels]."""
        start = self.num_delta_layers * self._recurrent_bytes // self._item_bytes
        return self._state_views(memory.view(self.dtype), start, self.conv_shape)

    def _state_views(
        self, memory: torch.Tensor, start: int, shape: tuple[int, ...]
    ) -> list[torch.Tensor]:
        """Of each recurrent layer a part of this shape, from `start` on in every slab."""
        slabs, size = memory.view(-1, self.slab_bytes // memory.itemsize), math.prod(shape)
        starts = (start + layer * size for layer in range(self.num_delta_layers))
        return [slabs[:, first : first + size].unflatten(1, shape) for first in starts]
