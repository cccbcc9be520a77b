"""A load in progress: what is still to be read, what has been, and which requests wait for it."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pippin.cache.entries.entry import Bytes
from pippin.cache.results import Lock
from pippin.cache.tiers.pieces import Piece
from pippin.cache.tiers.tier_io import ReadPiece
from pippin.scheduler.request import Request


@dataclass(eq=False)
class Reading:
    """A piece on its way: being read, read, or in a step."""

    piece: Piece
    buffer: Bytes | None  # None: it is used where it lies
    nbytes: int  # claimed for the payload that it becomes
    future: Future[ReadPiece]


@dataclass(eq=False)
class LoadJob:
    """One load, for one or more requests."""

    tokens: np.ndarray  # int32, up to the end of the match there
    salt: bytes
    pieces: deque[Piece]
    tier_lock: Lock  # in the tier's tree
    memory_lock: Lock  # on what the next piece connects to
    began: float
    deadline: float
    waiters: dict[Request, int] = field(default_factory=dict)  # and what memory had for them
    readings: deque[Reading] = field(default_factory=deque)
    in_steps: int = 0
    brought: int = 0  # tokens of the path that are in memory now because of it
    read_seconds: float = 0.0
    ended: bool = False
