"""What decode rows hold apart from their tails, and how it may lie. Knows no steps and no slots.

A row's *main* is never written: with two steps in flight something always reads it. It is replaced
when rows join, and when the tails of all rows are moved into new mains. Two arrangements:

    cohorts (cohort_mains.py)   rows of like length side by side, padded; plain operations attend
    packed  (packed_mains.py)   all rows one after the other, nothing padded; a kernel attends
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from pippin.backends.mlx.attention.decode_step import MainsShape, Tree
from pippin.backends.mlx.payloads.packing import KV


@dataclass
class Row:
    """One running request. `length` counts every token it holds, main and tail together."""

    slot: int
    index: int
    length: int
    prompt: np.ndarray | None = None  # int32, where the row may share what others begin with
    parked: dict[int, list[mx.array]] | None = None  # its state, while steps pass it over


@dataclass(frozen=True)
class Tails:
    """By cache [width, heads, TAIL, dim], and which columns are a row's own: bool [width, TAIL]."""

    kv: Mapping[int, Sequence[mx.array]]
    written: np.ndarray


class Mains(Protocol):
    @property
    def num_groups(self) -> int:
        """How many arrays of rows a step reads, for each layer."""
        ...

    def join(self, joining: Sequence[tuple[Row, MutableMapping[int, KV]]]) -> None:
        """Rows whose prompts are done, and what they hold by cache: [1, heads, tokens, dim]. What
        is copied of it is removed from there, so that rows are not in memory twice."""
        ...

    def leave(self, row: Row) -> None: ...

    def pieces_of(self, row: Row, cache: int) -> list[KV]:
        """What the row has here, in token order: [1, heads, tokens, dim] each."""
        ...

    def view(self, positions: np.ndarray, visible: np.ndarray) -> tuple[MainsShape, Tree]:
        """As a step sees them. `positions` int32 [width]: where each row's token stands;
        `visible` bool [width, TAIL]: tail columns that its token may look at, its own included."""
        ...

    def want_moving(self, rows: Sequence[Row], width: int, steps_unchanged: int) -> bool:
        """Whether steps would be simpler, or too much memory is spare."""
        ...

    def absorb(self, rows: Sequence[Row], tails: Tails) -> None:
        """Move the tails into new mains."""
        ...

    def renumber(self, new: Mapping[int, int]) -> None:
        """Rows have other indices now."""
        ...

    def arrays(self) -> list[mx.array]: ...
