"""Which drafter a backend has of its own: a draft model, or the MTP head of the checkpoint."""

from __future__ import annotations

import torch

from pippin.backends.torch.drafts.entries import PLAIN, LayerOperations, StepDrafter
from pippin.backends.torch.drafts.head_drafts import HeadDrafts
from pippin.backends.torch.drafts.model_drafter import ModelDrafter, RunLayers, run_plain
from pippin.backends.torch.drafts.mtp_drafter import LENGTH, MtpDrafter
from pippin.backends.torch.drafts.ring import DraftRing
from pippin.backends.torch.drafts.row_drafts import RowDrafts
from pippin.backends.torch.drafts.text_drafts import TextDrafts
from pippin.backends.torch.models.decoder import Decoder, Mix
from pippin.backends.torch.step.parts import StepParts


def make_drafts(
    parts: StepParts, decoder: Decoder, draft: Decoder | None, num_slots: int, *, kernels: bool
) -> tuple[RowDrafts, StepDrafter] | None:
    operations: LayerOperations = PLAIN
    run: RunLayers = run_plain
    if kernels:  # Triton is not everywhere
        from pippin.backends.torch.kernels.layers import feed_forward, run_layers
        from pippin.backends.torch.kernels.rows import norm_rows

        operations = LayerOperations(norm_rows, feed_forward)

        def run_kernels(decoder: Decoder, tokens: torch.Tensor, mix: Mix) -> torch.Tensor:
            return run_layers(decoder, decoder.embedded(tokens), mix)

        run = run_kernels
    if draft is not None:
        model = ModelDrafter(draft, decoder.shape.vocab_size, num_slots, run)
        return TextDrafts(parts, model), model
    if decoder.mtp is None:
        return None
    ring = DraftRing([decoder.mtp.mixer], num_slots, LENGTH, decoder.dtype, decoder.device)
    head = MtpDrafter(decoder, decoder.mtp, ring, operations)
    return HeadDrafts(parts, head), head
