"""The decoder's layers for many rows: sums and norms are one kernel, large products are cuBLAS's.

Knows no pools: a caller mixes the tokens.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.kernels.experts.feed_forward import feed_forward
from pippin.backends.torch.kernels.rows import add_norm, norm_rows
from pippin.backends.torch.models.decoder import Decoder, Mix


def run_layers(decoder: Decoder, x: torch.Tensor, mix: Mix) -> torch.Tensor:
    """As `Decoder.run` and the last norm, of embeddings: [tokens, hidden], what the head reads."""
    layers = decoder.layers
    normed = norm_rows(x, layers[0].input_norm)
    for index, layer in enumerate(layers):
        x, normed = add_norm(x, mix(layer, normed), layer.mlp_norm)
        last = index + 1 == len(layers)
        following = decoder.norm if last else layers[index + 1].input_norm
        x, normed = add_norm(x, feed_forward(layer.mlp, normed), following)
    return normed
