"""Which tokens of each request a draft model has yet to read, and how many drafts a row may have.

    text    [ long ago | fed, in the ring | known, not fed | input token, on the device ]
                                            fed             end

Steps without drafts feed it nothing, and neither does a prefix that is restored or a chunk of a
prompt. A row's missing tokens are fed at once when it is to have drafts again: from where the model
stopped if that is near, or MOST_FED of them, as a new text. So the work is bounded for any text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from pippin.backends.base import Admit, DecodeRow, PrefillRow
from pippin.backends.step.pending import StepOutputs

LENGTH = 512  # tokens of a row whose keys are kept,
NUM_FIRST = 4  # of these the first ones
MOST_FED = 256  # tokens of a row
MOST_TOKENS = 2048  # of all rows, in one forward

Row = DecodeRow | PrefillRow


def is_drafted(row: Row) -> bool:
    """Its next token is known when the step has run; what a grammar masks is sampled later."""
    return row.samples and not row.masked


@dataclass(eq=False)
class Text:
    """What the host knows of a request, and how much of it the model has read."""

    start: np.ndarray  # int32 [n]: what the request began with
    more: list[int] = field(default_factory=list)  # tokens that steps returned
    num_fed: int = 0
    is_fed: bool = False  # also all that the host has yet to read
    is_known: bool = True  # False: tokens are missing
    first: int = 0  # where the text begins that the model has read of

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
    restarts: bool = False  # as a new text

    @property
    def num_tokens(self) -> int:
        return self.end + 1 - self.first


class DraftTexts:
    def __init__(self, most_fed: int, most_places: int) -> None:
        """`most_places`: tokens of the longest text that the model reads."""
        self.most_fed = most_fed
        self._most_places = most_places
        self._texts: dict[int, Text] = {}

    def __getitem__(self, slot: int) -> Text:
        return self._texts[slot]

    def start(self, admit: Admit) -> None:
        self._texts[admit.slot] = Text(np.concatenate([admit.prompt, admit.reply]))

    def note_chunk(self, row: PrefillRow) -> None:
        """A chunk of a reply, whose slot has sampled before, has tokens that no step returned."""
        text = self._texts[row.slot]
        text.is_known &= not len(row.tokens) or row.start < len(text.start)

    def restart(self, slot: int) -> None:
        """What the model has read of it is lost."""
        if (text := self._texts.get(slot)) is not None:
            text.num_fed, text.is_fed = 0, False

    def missing(self, slot: int, end: int) -> Missing:
        """From here on it counts as fed."""
        text = self._texts[slot]
        first, known = text.num_fed, text.knows(end)
        is_far = end + 1 - first > self.most_fed
        is_long = end + MOST_FED - text.first > self._most_places
        restarts = not first or is_far or is_long or not known
        if restarts:
            first = text.first = max(0, end + 1 - self.most_fed) if known else end
        text.is_fed = True
        return Missing(slot, first, end, text.tokens(first, end), restarts)

    def to_feed(
        self, rows: Sequence[DecodeRow], is_exact: Callable[[DecodeRow], bool]
    ) -> Iterator[list[Missing]]:
        """Of rows that are to have drafts, what they lack. `is_exact`: their position is."""
        missing = []
        for row in rows:
            text = self._texts[row.slot]
            wanted = is_drafted(row) and (row.depth or row.num_drafts)
            if wanted and is_exact(row) and not text.is_fed and text.knows(row.position):
                missing.append(self.missing(row.slot, row.position))
        return in_groups(missing)

    def behind_chunks(self, rows: Sequence[PrefillRow]) -> Iterator[list[Missing]]:
        """Of prompts that have sampled and are to have drafts."""
        drafted = [row for row in rows if is_drafted(row) and row.num_drafts]
        return in_groups([self.missing(row.slot, row.end) for row in drafted])

    def pass_over(self, rows: Sequence[DecodeRow]) -> None:
        """A step runs these, and its tokens are not fed."""
        for row in rows:
            text = self._texts[row.slot]
            if text.is_fed:  # as far as the input token
                text.num_fed, text.is_fed = row.position + 1, False

    def note_sampled(self, step: StepOutputs) -> None:
        """What it samples is known when it has been read, if the requests still run."""
        rows = step.plan.sampled_rows
        for row in rows:
            self._texts[row.slot].is_known &= not row.masked
        step.reads.append(partial(_read, step, [(r.slot, self._texts[r.slot]) for r in rows]))


def _read(step: StepOutputs, texts: Sequence[tuple[int, Text]]) -> None:
    for slot, text in texts:
        text.more += step.tokens.get(slot, ())


def in_groups(missing: Sequence[Missing]) -> Iterator[list[Missing]]:
    """Of as many tokens each as one forward takes, padding included."""
    group: list[Missing] = []
    for found in sorted(missing, key=lambda each: each.num_tokens):
        if group and (len(group) + 1) * found.num_tokens > MOST_TOKENS:
            yield group
            group = []
        group.append(found)
    if group:
        yield group


MOST_SHARE = 0.03  # of the bytes of a row that has
ROW_TOKENS = 2048
FEW_BYTES = 512 << 10  # of a row: small models verify as many drafts as others
NOT_DETERMINISTIC = "with --deterministic a row's sums do not depend on how many tokens a step runs"

logger = logging.getLogger(__name__)


def affordable_depth(
    max_depth: int, draft_bytes: Callable[[int], int], row_bytes: Callable[[int], int]
) -> int:
    """The most drafts of a row, `max_depth` at most, whose memory is a small share of the row's, or
    a few kilobytes.

    `draft_bytes`: of a row that may have so many; `row_bytes`: of so many tokens without drafts.
    """
    most = max(MOST_SHARE * row_bytes(ROW_TOKENS), FEW_BYTES)
    depths = [depth for depth in range(1, max_depth + 1) if draft_bytes(depth) <= most]
    depth = max(depths, default=min(max_depth, 1))
    if depth:
        share = draft_bytes(depth) / row_bytes(ROW_TOKENS)
        logger.info(
            "at most %d drafts of a request are verified in a step: their memory is %.1f%% of a "
            "request of %s tokens",
            depth,
            100 * share,
            f"{ROW_TOKENS:,}",
        )
    return depth
