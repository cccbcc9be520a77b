"""What the backend's own drafters read and return. Knows no weights.

    entry at position p     the hidden vector of token p, and token p + 1: drafts token p + 2

Shapes depend on the numbers of rows and of drafts alone, and nothing waits: a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from pippin.backends.torch.models.parts import Mlp, Norm

# Of logits [rows, vocab], and of the positions of the tokens that they are of: int32 [rows].
ChooseDrafts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerOperations:
    """Plain ones; on GPUs kernels stand in for them."""

    norm: Callable[[torch.Tensor, Norm], torch.Tensor] = lambda x, norm: norm(x)
    feed_forward: Callable[[Mlp, torch.Tensor], torch.Tensor] = lambda mlp, x: mlp(x)


PLAIN = LayerOperations()


class Entries(NamedTuple):
    """Of rows one after the other, each as many."""

    owners: torch.Tensor  # int64 [rows]: their slots
    slots: torch.Tensor  # int64 [n]; 0: it is not kept
    positions: torch.Tensor  # int64 [n]
    tokens: torch.Tensor  # int64 [n]: those behind
    hidden: torch.Tensor | None  # [n, hidden]; None: not known


class Entered(NamedTuple):
    """What a drafter has made of entries."""

    x: torch.Tensor  # [n, hidden]
    q: torch.Tensor | None = None  # [n, heads, channels]: of a layer that has not attended
    gate: torch.Tensor | None = None  # [n, heads * channels]

    def at(self, rows: torch.Tensor) -> Entered:
        q, gate = (None if part is None else part[rows] for part in (self.q, self.gate))
        return Entered(self.x[rows], q, gate)


class StepDrafter(Protocol):
    def feed(self, entries: Entries, bound: int | None = None) -> Entered:
        """`bound`: of their positions; None: it is not known."""
        ...

    def draft(
        self,
        last: Entered,  # of the entries that rows go on from
        slots: torch.Tensor,  # int64 [rows]
        positions: torch.Tensor,  # int64 [rows]: of these entries
        num_drafts: int,
        choose: ChooseDrafts,
        bound: int | None = None,  # of these positions
    ) -> torch.Tensor:
        """int32 [rows, num_drafts]: tokens from two behind the entries on."""
        ...
