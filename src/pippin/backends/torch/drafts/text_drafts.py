"""Drafts by a model of its own, which reads tokens alone. Knows no weights.

    text    [ long ago | fed, in the ring | known, not fed | input token, on the device ]
                                            fed             end

Steps without drafts feed it nothing, and neither does a prefix that is restored or a chunk of a
prompt. A row's missing tokens are fed at once when it is to have drafts again: from where the model
stopped if that is near, or MOST_FED of them, as a new text. So the work is bounded for any text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.torch.drafts.entries import Entered, Entries
from pippin.backends.torch.drafts.model_drafter import ModelDrafter
from pippin.backends.torch.drafts.row_drafts import RowDrafts, is_drafted
from pippin.backends.torch.step.parts import StepParts
from pippin.backends.torch.step.pending import TorchPending

MOST_FED = 256  # tokens of a row
MOST_TOKENS = 2048  # of all rows, in one forward


@dataclass(eq=False)
class Text:
    """What the host knows of a request, and how much of it the model has read."""

    start: np.ndarray  # int32 [n]: what the request began with
    more: list[int] = field(default_factory=list)  # tokens that steps returned
    num_fed: int = 0
    is_fed: bool = False  # also all that the host has yet to read
    is_known: bool = True  # False: tokens are missing

    def knows(self, end: int) -> bool:
        return self.is_known and end <= len(self.start) + len(self.more)

    def tokens(self, first: int, end: int) -> np.ndarray:
        own = self.start[first:end]
        split = len(self.start)
        rest = self.more[max(first - split, 0) : max(end - split, 0)]
        return np.concatenate([own, np.array(rest, dtype=np.int32)])


class Missing(NamedTuple):
    """Tokens [first, end) of a slot, and the one at `end`, which is on the device."""

    slot: int
    first: int
    end: int
    tokens: np.ndarray

    @property
    def num_tokens(self) -> int:
        return self.end + 1 - self.first


class TextDrafts(RowDrafts):
    def __init__(self, parts: StepParts, drafter: ModelDrafter) -> None:
        super().__init__(parts, drafter)
        self._model = drafter
        self._most_fed = min(MOST_FED, drafter.ring.length // 2)
        self._texts: dict[int, Text] = {}

    def start(self, admit: Admit) -> None:
        self._texts[admit.slot] = Text(np.concatenate([admit.prompt, admit.reply]))

    def prepare(self, rows: Sequence[DecodeRow]) -> None:
        missing = []
        for row in rows:
            text = self._texts[row.slot]
            is_exact = self._parts.rows.least_lengths[row.slot] == row.position
            wanted = is_drafted(row) and (row.depth or row.num_drafts)
            if wanted and is_exact and not text.is_fed and text.knows(row.position):
                missing.append(self._missing(row.slot, row.position))
        for group in _groups(missing):
            self._feed(group)

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        for row in rows:
            text = self._texts[row.slot]
            if text.is_fed:  # as far as the input token
                text.num_fed, text.is_fed = row.position + 1, False

    def note_sampled(self, step: TorchPending) -> None:
        """What it samples is known when it has been read, if the requests still run."""
        rows = step.plan.sampled_rows
        for row in rows:
            self._texts[row.slot].is_known &= not row.masked
        step.reads.append(partial(_read, step, [(r.slot, self._texts[r.slot]) for r in rows]))

    def behind_chunks(self, rows: Sequence[PrefillRow], hidden: torch.Tensor | None) -> None:
        for row in rows:
            if self._parts.slots.continues_reply(row):
                self._texts[row.slot].is_known = False
        drafted = [row for row in rows if is_drafted(row) and row.num_drafts]
        by_slot = {row.slot: row for row in drafted}
        for group in _groups([self._missing(row.slot, row.end) for row in drafted]):
            entered, last = self._feed(group)
            ends = np.array([missing.end for missing in group])
            own, index = [by_slot[missing.slot] for missing in group], self._parts.pools.index
            self._draft(own, entered, last, index(ends - 1), int(ends.max()))

    def behind_restored(self, rows: Sequence[PrefillRow], hidden: torch.Tensor) -> None:
        self.behind_chunks(rows, None)

    def run_largest(self) -> None:
        num_rows = min(len(self._model.firsts) - 1, MOST_TOKENS // self._most_fed)
        group = [Missing(0, 0, self._most_fed - 1, np.zeros(self._most_fed - 1, dtype=np.int32))]
        self._feed(group * num_rows)

    def _missing(self, slot: int, end: int) -> Missing:
        text, model = self._texts[slot], self._model
        first = text.num_fed
        is_far = end + 1 - first > self._most_fed
        is_long = end + MOST_FED - model.firsts[slot] > model.most_places
        if not first or is_far or is_long or not text.knows(end):
            first = max(0, end + 1 - self._most_fed) if text.knows(end) else end
            model.start(slot, first)
        return Missing(slot, first, end, text.tokens(first, end))

    def _feed(self, group: Sequence[Missing]) -> tuple[Entered, torch.Tensor]:
        """What the model makes of them, and where the last of each row is, int64 [rows]."""
        index, num_rows = self._parts.pools.index, len(group)
        lengths = np.array([missing.num_tokens for missing in group])
        width, owners = int(lengths.max()), np.array([missing.slot for missing in group])
        tokens, positions = np.zeros((2, num_rows, width), dtype=np.int64)
        for row, missing in enumerate(group):
            tokens[row, : len(missing.tokens)] = missing.tokens
            positions[row] = missing.first - 1 + np.arange(width)
            if (text := self._texts.get(missing.slot)) is not None:
                text.is_fed = True
        slots = np.where(np.arange(width) < lengths[:, None], owners[:, None], 0)
        last, device_owners = index(np.arange(num_rows) * width + lengths - 1), index(owners)
        device_tokens = index(tokens.ravel())
        device_tokens[last] = self._parts.future.tokens[device_owners].long()
        places = lengths + np.array([missing.first for missing in group])
        bound = int((places - self._model.firsts[owners]).max()) - 2
        entries = Entries(
            device_owners, index(slots.ravel()), index(positions.ravel()), device_tokens, None
        )
        return self._model.feed(entries, bound), last


def _read(step: TorchPending, texts: Sequence[tuple[int, Text]]) -> None:
    for slot, text in texts:
        text.more += step.tokens.get(slot, ())


def _groups(missing: Sequence[Missing]) -> Iterator[list[Missing]]:
    """Of as many tokens each as one forward takes, padding included."""
    group: list[Missing] = []
    for found in sorted(missing, key=lambda each: each.num_tokens):
        if group and (len(group) + 1) * found.num_tokens > MOST_TOKENS:
            yield group
            group = []
        group.append(found)
    if group:
        yield group
