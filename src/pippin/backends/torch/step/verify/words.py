"""What a captured step that verifies drafts reads, as one array of words: sent in one copy.

    as a decode step's   slot | position, at most | ... | noise's stream, two words | how it samples
    behind that          exact | least position | depth | kept drafts | length of the prompt
                         whether the drafts are the device's own | whether the sampler draws
                         stop ids
                         cells from the least position on | what the host proposes there

Rows that a graph has and a step has not are padding: slot 0, no drafts, cells of waste.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from pippin.backends.base import MAX_STOP_IDS
from pippin.backends.torch.pools.rows import Rows
from pippin.backends.torch.step.decode_inputs import FIELDS, NO_ROWS, Inputs, RowArrays, pack_inputs
from pippin.backends.torch.step.slots import Slots
from pippin.backends.torch.step.verify.batch import NO_TOKEN, TakenRows

OWN_FIELDS = ("exact", "least", "depth", "num_kept", "prompt_len", "is_drafted", "is_left")
FIRST_STOP = len(FIELDS) + len(OWN_FIELDS)
FIRST_CELL = FIRST_STOP + MAX_STOP_IDS
MOST_TOKENS = 256  # of a captured step: more rows are several


class VerifySize(NamedTuple):
    num_rows: int
    depth: int
    span: int  # cells of a row that a step may write, and tokens that may be proposed: each
    num_drafts: int = 0  # that it leaves for the next one

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return 1 + self.depth

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.width

    @property
    def num_fields(self) -> int:
        return FIRST_CELL + 2 * self.span


@dataclass(frozen=True)
class Places:
    """Tokens of rows, on the device: what each looks up, and what its row is."""

    size: VerifySize
    rows: torch.Tensor  # int32 [fields, rows]: the words
    inputs: Inputs  # as a decode step's, of every token
    tokens: torch.Tensor  # int32 [tokens]
    drafts: torch.Tensor  # int32 [rows, depth], NO_TOKEN where there is none
    starts: torch.Tensor  # int32 [rows]
    counts: torch.Tensor  # int32 [rows]: kept drafts that are run first

    def column(self, name: str) -> torch.Tensor:
        """int32 [rows]"""
        fields = (*FIELDS, *OWN_FIELDS)
        return self.rows[fields.index(name)]


def span_for(max_depth: int) -> int:
    """Where one step with drafts is in flight at most."""
    return 2 * max_depth + 1


def padding_words(size: VerifySize, waste_cell: int) -> np.ndarray:
    words = np.zeros((size.num_fields, size.num_rows), dtype=np.int32)
    words[: len(FIELDS)] = pack_inputs(size.num_rows, NO_ROWS, waste_cell)
    words[len(FIELDS)] = 1
    words[FIRST_STOP:FIRST_CELL] = NO_TOKEN
    words[FIRST_CELL : FIRST_CELL + size.span] = waste_cell
    words[FIRST_CELL + size.span :] = NO_TOKEN
    return words


def pack_verify(
    size: VerifySize,
    taken: TakenRows,
    held: Rows,
    slots: Slots,
    waste_cell: int,
    is_left: np.ndarray | bool = False,  # bool [rows]: those whose tokens the sampler draws
) -> np.ndarray:
    words, num_rows = padding_words(size, waste_cell), len(taken.rows)
    none = np.zeros(num_rows, dtype=np.int64)
    rows = RowArrays(
        taken.slots, taken.positions, none + waste_cell, taken.states_in, taken.states_out
    )
    words[: len(FIELDS)] = pack_inputs(size.num_rows, rows, waste_cell)
    slots.columns.fill(words[: len(FIELDS)], taken.slots, none)  # keys of number 0: the streams
    own = (
        *(taken.exact, taken.least, taken.depths, taken.num_kept, slots.prompt_lens[taken.slots]),
        [row.drafted for row in taken.rows],
        is_left,
    )
    for field, values in enumerate(own, start=len(FIELDS)):
        words[field, :num_rows] = values
    words[FIRST_STOP:FIRST_CELL, :num_rows] = slots.stop_ids[taken.slots].T
    for number, row in enumerate(taken.rows):
        least, end = int(taken.least[number]), row.end
        cells = held.held(row.slot, least, end)
        words[FIRST_CELL : FIRST_CELL + len(cells), number] = cells
        if row.depth and (proposal := row.proposal) is not None:
            first = max(least + 1, proposal.start)
            part = proposal.tokens[first - proposal.start :][: least + 1 + size.span - first]
            at = FIRST_CELL + size.span + first - least - 1
            words[at : at + len(part), number] = part
    return words
