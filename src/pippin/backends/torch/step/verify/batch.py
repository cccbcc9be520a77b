"""Rows that verify drafts, as index arrays: what a forward looks up and where it writes.

The host knows a row's slot, how many drafts it has and two bounds of its length; the rest is looked
up on the device, and nothing is read back. Knows no model and no sampling.

    tokens   packed    [ input, draft, draft | input | input, draft ]      each row its own depth
             padded    [rows, width], width that of the deepest row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pippin.backends.base import DecodeRow
from pippin.backends.step.slots import FutureMap
from pippin.backends.torch.pools.memory import Pools
from pippin.backends.torch.pools.row_cells import RowCells
from pippin.backends.torch.pools.rows import Rows

NO_TOKEN = -1


@dataclass(frozen=True)
class TakenRows:
    """Decode rows for which cells and states have been taken; on the host, int64 [rows]."""

    rows: tuple[DecodeRow, ...]
    slots: np.ndarray
    positions: np.ndarray  # of the input tokens, at most
    least: np.ndarray  # the same, at least
    depths: np.ndarray
    num_kept: np.ndarray  # drafts of the last step: those that it accepted are run first
    states_in: np.ndarray
    states_out: np.ndarray

    @property
    def exact(self) -> np.ndarray:
        found: np.ndarray = self.least == self.positions
        return found

    @property
    def width(self) -> int:
        """Tokens of the deepest row."""
        return 1 + int(self.depths.max())

    @property
    def places(self) -> np.ndarray:
        """int64 [tokens]: of the packed tokens, where they are padded."""
        width = np.arange(self.width)
        return np.flatnonzero(width <= self.depths[:, None])


@dataclass(frozen=True)
class SeenCells:
    """What the tokens of one row see."""

    cells: torch.Tensor  # int64 [cells]
    # Where the length is not known: bool [cells], which of them the row has written; and bool
    # [tokens, cells], which of them are up to each token.
    written: torch.Tensor | None = None
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class VerifiedCells:
    """Of the layers of one kind: where the new tokens' KV goes, and what they see."""

    cells: torch.Tensor  # int64 [tokens]
    seen: tuple[SeenCells, ...]  # of each row


@dataclass(frozen=True)
class VerifyBatch:
    lengths: list[int]  # of the rows' new tokens
    width: int
    slots: torch.Tensor  # int64 [rows]
    starts: torch.Tensor  # int64 [rows]: the input tokens' positions
    drafts: torch.Tensor  # int32 [rows, width - 1], NO_TOKEN where there is none
    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    places: torch.Tensor  # int64 [tokens]: where they are padded
    counts: torch.Tensor  # int64 [rows]: kept drafts that are run first
    most_kept: int  # of these, at most
    states_in: torch.Tensor  # int64 [rows]
    states_out: torch.Tensor
    held: VerifiedCells
    windows: VerifiedCells | None  # of layers with a window


def take_rows(
    rows: Sequence[DecodeRow], held: Rows, pools: Pools, *, send: bool = True
) -> TakenRows:
    """Takes the cells and states that the rows write. `send`: as for `Rows.reserve_each`."""
    slots, positions, depths = (
        np.array([getattr(row, name) for row in rows]) for name in ("slot", "position", "depth")
    )
    least, num_kept = held.least_lengths[slots], held.num_kept[slots]
    num_cells = held.num_missing(slots, positions + 1 + depths)
    pools.arena.make_room(num_cells, held.num_new_states(slots))
    held.reserve_each(slots, positions, depths, send=send)
    states = held.next_states(slots)
    return TakenRows(tuple(rows), slots, positions, least, depths, num_kept, *states)


def verify_batch(
    taken: TakenRows, held: Rows, future: FutureMap[torch.Tensor], pools: Pools
) -> VerifyBatch:
    index, width = pools.index, taken.width
    slots, depths = index(taken.slots), index(taken.depths)
    starts = torch.where(
        pools.index(taken.exact) > 0, index(taken.positions), future.lengths[slots].long()
    )
    drafts = _drafts(taken, slots, starts, depths, future, pools)
    places = index(taken.places)
    inputs = torch.cat([future.tokens[slots, None], drafts.clamp_min(0)], dim=1)
    positions = starts[:, None] + torch.arange(width, device=pools.device)
    owners = slots[:, None].expand_as(positions).flatten()[places]
    positions = positions.flatten()[places]

    def of_kind(cells: RowCells) -> VerifiedCells:
        seen = [_seen(taken, row, starts, cells, pools) for row in range(len(taken.rows))]
        return VerifiedCells(cells.table[owners, positions].long(), tuple(seen))

    return VerifyBatch(
        lengths=(1 + taken.depths).tolist(),
        width=width,
        slots=slots,
        starts=starts,
        drafts=drafts,
        tokens=inputs.flatten()[places].long(),
        positions=positions,
        places=places,
        counts=torch.where(index(taken.num_kept) > 0, future.counts[slots].long(), 0),
        most_kept=int(taken.num_kept.max()),
        states_in=index(taken.states_in),
        states_out=index(taken.states_out),
        held=of_kind(held.cells),
        windows=None if held.windows is None else of_kind(held.windows),
    )


def _drafts(
    taken: TakenRows,
    slots: torch.Tensor,
    starts: torch.Tensor,
    depths: torch.Tensor,
    future: FutureMap[torch.Tensor],
    pools: Pools,
) -> torch.Tensor:
    """int32 [rows, width - 1]: those behind the rows' lengths, of the host's or of the device's."""
    depth = taken.width - 1
    if not depth:
        return slots.new_zeros(len(slots), 0, dtype=torch.int32)
    behind = torch.arange(depth, device=pools.device)
    bases, proposed = _proposed(taken)
    known = pools.index(proposed)
    at = starts[:, None] + 1 + behind - pools.index(bases)[:, None]
    inside = (at >= 0) & (at < known.shape[1])
    found = known.gather(1, at.clamp(0, known.shape[1] - 1)).masked_fill(~inside, NO_TOKEN)
    on_device = [row.drafted for row in taken.rows]
    for row, is_own in zip(taken.rows, on_device, strict=True):
        if is_own:
            future.note_drafts_read(row.slot, row.depth)
    if any(on_device):
        own = pools.index(np.array(on_device))[:, None] > 0
        found = torch.where(own, future.drafts[slots, :depth].long(), found)
    return found.masked_fill(behind >= depths[:, None], NO_TOKEN).int()


def _proposed(taken: TakenRows) -> tuple[np.ndarray, np.ndarray]:
    """What the host proposes of positions from a base on, int64 [rows] and [rows, n].

    No more than there can be drafts: a row's length has two bounds.
    """
    most = int((taken.positions - taken.least + taken.depths).max())
    tokens = np.full((len(taken.rows), max(most, 1)), NO_TOKEN, dtype=np.int64)
    bases = taken.least + 1
    for number, row in enumerate(taken.rows):
        if row.depth and (proposal := row.proposal) is not None:
            base = bases[number] = max(int(bases[number]), proposal.start)
            part = proposal.tokens[base - proposal.start :][: tokens.shape[1]]
            tokens[number, : len(part)] = part
    return bases, tokens


def _seen(
    taken: TakenRows, row: int, starts: torch.Tensor, cells: RowCells, pools: Pools
) -> SeenCells:
    least, most = int(taken.least[row]), int(taken.positions[row])
    depth = int(taken.depths[row])
    first, end = cells.first_seen(least), most + 1 + depth
    seen = pools.index(cells.held(int(taken.slots[row]), first, end))
    if least == most:
        return SeenCells(seen)
    keys = torch.arange(first, end, device=pools.device)
    last = starts[row] + torch.arange(1 + depth, device=pools.device)[:, None]
    return SeenCells(seen, keys <= last[-1], keys <= last)
