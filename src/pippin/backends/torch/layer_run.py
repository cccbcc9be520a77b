"""A batch on its way through layers. Attention is here; recurrences are in subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from pippin.backends.torch.attention.plain import attend_rows
from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.decoder import DecoderLayer
from pippin.backends.torch.models.delta_layer import DeltaLayer
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.step.batches import ChunkBatch, DecodeBatch

Batch = TypeVar("Batch", ChunkBatch, DecodeBatch)


class LayerRun(ABC, Generic[Batch]):
    def __init__(self, batch: Batch, pools: Pools) -> None:
        self._batch: Batch = batch
        self._pools = pools
        self._lengths = batch.lengths

    def mix(self, layer: DecoderLayer, x: torch.Tensor) -> torch.Tensor:
        mixer = layer.mixer
        if isinstance(mixer, AttentionLayer):
            return self._attend(mixer, layer.number, x)
        return self._recur(mixer, layer.number, x)

    def _attend(self, mixer: AttentionLayer, number: int, x: torch.Tensor) -> torch.Tensor:
        batch = self._batch
        if mixer.window:
            assert batch.windows is not None
            kv, held = self._pools.window_kv[number], batch.windows
        else:
            kv, held = self._pools.kv[number], batch.held
        q, k, v, gate = mixer.project(x, batch.positions)
        kv[held.cells] = torch.stack([k, v], dim=1)
        y = attend_rows(q, kv, self._lengths, held.seen, mixer.window)
        return mixer.finish(y, gate)

    @abstractmethod
    def _recur(self, mixer: DeltaLayer, number: int, x: torch.Tensor) -> torch.Tensor: ...
