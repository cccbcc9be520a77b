"""Drafts by an MTP head: entries of rows are fed to it, and it goes on from their last ones.

Shapes depend on the numbers of rows and of drafts alone, and nothing waits: a graph can hold it.
Knows no plans and no sampling.

    entry at position p     the hidden vector of token p, and token p + 1: drafts token p + 2
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pippin.backends.torch.drafts.ring import HeadRing
from pippin.backends.torch.models.decoder import Decoder
from pippin.backends.torch.models.mtp_head import MtpHead
from pippin.backends.torch.models.parts import Mlp, Norm

# Of logits [rows, vocab], and of the positions of the tokens that they are of: int32 [rows].
ChooseDrafts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class HeadOperations:
    """Plain ones; on GPUs kernels stand in for them."""

    norm: Callable[[torch.Tensor, Norm], torch.Tensor] = lambda x, norm: norm(x)
    feed_forward: Callable[[Mlp, torch.Tensor], torch.Tensor] = lambda mlp, x: mlp(x)


class Entries(NamedTuple):
    slots: torch.Tensor  # int64 [n]; 0: it is not kept
    positions: torch.Tensor  # int64 [n]
    tokens: torch.Tensor  # int64 [n]: those behind
    hidden: torch.Tensor  # [n, hidden]


class Entered(NamedTuple):
    """What the head makes of entries before it attends."""

    x: torch.Tensor  # [n, hidden]
    q: torch.Tensor  # [n, heads, channels]
    gate: torch.Tensor | None  # [n, heads * channels]

    def at(self, rows: torch.Tensor) -> Entered:
        gate = None if self.gate is None else self.gate[rows]
        return Entered(self.x[rows], self.q[rows], gate)


class MtpDrafter:
    def __init__(
        self,
        decoder: Decoder,
        head: MtpHead,
        ring: HeadRing,
        operations: HeadOperations = HeadOperations(),
    ) -> None:
        self._decoder = decoder
        self._head = head
        self.ring = ring
        self._norm = operations.norm
        self._feed_forward = operations.feed_forward
        self._last_position = len(head.mixer.rope.cos) - 1

    def feed(self, entries: Entries) -> Entered:
        head = self._head
        embedded = self._norm(self._decoder.embed[entries.tokens], head.embed_norm)
        hidden = self._norm(entries.hidden, head.hidden_norm)
        x = head.fc(torch.cat([embedded, hidden], dim=-1))
        # Drafts may lie behind the longest text there is: they are never accepted.
        positions = entries.positions.clamp_max(self._last_position)
        q, k, v, gate = head.mixer.project(self._norm(x, head.input_norm), positions)
        self.ring.write(entries.slots, entries.positions, k, v)
        return Entered(x, q, gate)

    def draft(
        self,
        last: Entered,  # of the entries that rows go on from
        slots: torch.Tensor,  # int64 [rows]
        positions: torch.Tensor,  # int64 [rows]: of these entries
        num_drafts: int,
        choose: ChooseDrafts,
        bound: int | None = None,  # of these positions; None: it is not known
    ) -> torch.Tensor:
        """int32 [rows, num_drafts]: tokens from two behind the entries on."""
        drafts: list[torch.Tensor] = []
        while True:
            most = None if bound is None else bound + len(drafts)
            hidden = self._finish(last, slots, positions, most)
            token = choose(self._decoder.head(hidden), positions + 2)
            drafts.append(token)
            if len(drafts) == num_drafts:
                return torch.stack(drafts, dim=1)
            positions = positions + 1
            last = self.feed(Entries(slots, positions, token.long(), hidden))

    def _finish(
        self, entered: Entered, slots: torch.Tensor, positions: torch.Tensor, bound: int | None
    ) -> torch.Tensor:
        """[rows, hidden]: what the model's head reads, and the head's next entry."""
        head, (x, q, gate) = self._head, entered
        x = x + head.mixer.finish(self.ring.attend(q, slots, positions, bound), gate)
        x = x + self._feed_forward(head.mlp, self._norm(x, head.mlp_norm))
        return self._norm(x, head.norm)
