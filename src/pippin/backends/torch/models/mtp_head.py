"""The MTP head of a checkpoint: one attention layer that drafts the token behind the next one.

What it computes is in `backends/mtp_weights.py`. Knows no pools: a caller attends.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pippin.backends.torch.models.attention_layer import AttentionLayer
from pippin.backends.torch.models.parts import Linear, Mlp, Norm


@dataclass(frozen=True)
class MtpHead:
    fc: Linear  # [hidden, 2 * hidden]: of an embedding and a hidden vector
    embed_norm: Norm
    hidden_norm: Norm
    input_norm: Norm
    mixer: AttentionLayer
    mlp_norm: Norm
    mlp: Mlp
    norm: Norm

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device
