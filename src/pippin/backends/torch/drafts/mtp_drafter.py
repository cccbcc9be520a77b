"""Drafts by an MTP head: entries of rows are fed to it, and it goes on from their last ones.

Knows no plans and no sampling.
"""

from __future__ import annotations

import torch

from pippin.backends.torch.drafts.entries import (
    PLAIN,
    ChooseDrafts,
    Entered,
    Entries,
    LayerOperations,
)
from pippin.backends.torch.drafts.ring import DraftRing
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.mtp_head import MtpHead

LENGTH = 64  # tokens of a row whose keys are kept


class MtpDrafter:
    def __init__(
        self,
        decoder: Decoder,
        head: MtpHead,
        ring: DraftRing,
        operations: LayerOperations = PLAIN,
    ) -> None:
        self._decoder = decoder
        self._head = head
        self.ring = ring
        self._norm = operations.norm
        self._feed_forward = operations.feed_forward
        self._last_position = len(head.mixer.rope.cos) - 1

    def feed(self, entries: Entries, bound: int | None = None) -> Entered:
        head = self._head
        assert entries.hidden is not None
        embedded = self._norm(self._decoder.embedded(entries.tokens), head.embed_norm)
        hidden = self._norm(entries.hidden, head.hidden_norm)
        x = head.fc(torch.cat([embedded, hidden], dim=-1))
        # Drafts may lie behind the longest text there is: they are never accepted.
        positions = entries.positions.clamp_max(self._last_position)
        q, k, v, gate = head.mixer.project(self._norm(x, head.input_norm), positions)
        self.ring.write(0, entries.slots, entries.positions, k, v)
        return Entered(x, q, gate)

    def draft(
        self,
        last: Entered,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_drafts: int,
        choose: ChooseDrafts,
        bound: int | None = None,
    ) -> torch.Tensor:
        drafts: list[torch.Tensor] = []
        while True:
            most = None if bound is None else bound + len(drafts)
            hidden = self._finish(last, slots, positions, most)
            token = choose(self._decoder.head(hidden), positions + 2)
            drafts.append(token)
            if len(drafts) == num_drafts:
                return torch.stack(drafts, dim=1)
            positions = positions + 1
            last = self.feed(Entries(slots, slots, positions, token.long(), hidden))

    def _finish(
        self, entered: Entered, slots: torch.Tensor, positions: torch.Tensor, bound: int | None
    ) -> torch.Tensor:
        """[rows, hidden]: what the model's head reads, and the head's next entry."""
        head, (x, q, gate) = self._head, entered
        assert q is not None
        places, scoring = positions[:, None], head.mixer.scoring
        x = x + head.mixer.finish(self.ring.attend(0, q, slots, places, scoring, bound), gate)
        x = x + self._feed_forward(head.mlp, self._norm(x, head.mlp_norm))
        return self._norm(x, head.norm)
