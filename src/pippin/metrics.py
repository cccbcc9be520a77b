"""What each step did and when: the numbers behind "overlap hides the host"."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from pippin.errors import LoadError
from pippin.types import StepForwards

WINDOW_STEPS = 512  # steps that rates and shares are computed over
NOTICEABLE_SECONDS = 1e-4  # of waiting: less is the cost of asking

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepRecord:
    """Times are time.perf_counter() seconds on one clock.

    planned ────── dispatched ─────── device_done ─ resumed ─── committed
      host plans, builds │ device works     │           │ host commits
    """

    step: int
    planned: float  # planning began
    dispatched: float  # the graph was built and its first operation sent to the device
    launched: float  # launch returned
    device_done: float  # the device finished: seen, or at the earliest
    resumed: float  # waiting for it returned; under overlap the next step was launched before
    committed: float  # commit returned
    waited: float  # seconds the host was blocked waiting for this step
    prefill_tokens: int
    decode_rows: int
    ghosts: int
    after_pause: bool = False  # the engine had nothing to do before this step
    forwards: StepForwards = field(default_factory=StepForwards)
    drafts: int = 0  # that its rows verified
    accepted: int = 0  # of these
    own_drafts: int = 0  # of the drafts, those that the device had made
    drafts_left: int = 0  # that it made for the next step
    # Of each row with drafts: its slot, how many it verified, and how many of these it accepted.
    verified: tuple[tuple[int, int, int], ...] = ()

    @property
    def host_waited(self) -> bool:
        """Whether the host had to wait for this step; if not, the device may have waited for it."""
        return self.waited > NOTICEABLE_SECONDS

    @property
    def plan_seconds(self) -> float:
        """The host's work until the device had something to do: planning and building."""
        return self.dispatched - self.planned

    @property
    def commit_seconds(self) -> float:
        return self.committed - self.resumed

    def idle_since(self, before: StepRecord) -> tuple[float, float]:
        """Seconds without work on the device from `before`'s end to this one's, of how many: an
        upper bound. A step is taken to be on the device from its dispatch, or from the end of the
        one before it, whichever is later, until its own end."""
        idle = max(0.0, self.dispatched - before.device_done)
        busy = max(0.0, self.device_done - max(self.dispatched, before.device_done))
        return idle, idle + busy


class StepLog:
    """Writes every record to a file at once, as a line of JSON."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._over = False
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise LoadError(f"cannot write a step log: {error}") from error

    def write(self, record: StepRecord) -> None:
        """If the disk is full or missing, the log ends and the engine continues."""
        if self._over:
            return
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            self._over = True
            logger.warning("the step log %s ends here: %s", self._path, error)

    def close(self) -> None:
        self._file.close()


def read_step_log(path: Path) -> list[StepRecord]:
    return msgspec.json.Decoder(StepRecord).decode_lines(path.read_bytes())


@dataclass
class DraftCounts:
    """Of one drafter, since start."""

    accepted_at: list[int]  # by place behind the input token
    rows: int = 0  # that verified drafts of it, one in each step
    drafted: int = 0
    accepted: int = 0  # of these

    def add(self, depth: int, accepted: int) -> None:
        self.rows += 1
        self.drafted += depth
        self.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1


@dataclass
class EngineMetrics:
    """Counters since start, and shares over the last `WINDOW_STEPS` steps."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0  # of these, loaded from the host's memory
    disk_tokens: int = 0  # and from disk
    peer_tokens: int = 0  # and from prefill engines
    computed_tokens: int = 0  # prompt tokens run through the model
    generated_tokens: int = 0
    forced_tokens: int = 0  # of these, known from a grammar before they were drawn
    drafters: dict[str, DraftCounts] = field(default_factory=dict)  # by name
    ghost_rows: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    preemptions: int = 0  # running requests that were preempted, to be resumed
    watch_failures: int = 0  # of the feed's recorder, which stops at the first
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    log: StepLog | None = None  # gets all of them

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.computed_tokens += record.prefill_tokens
        self.ghost_rows += record.ghosts
        self.records.append(record)
        if self.log is not None:
            self.log.write(record)

    def add_drafts(self, drafter: str, depth: int, accepted: int) -> None:
        """A row of a step verified so many."""
        self.drafters[drafter].add(depth, accepted)

    @property
    def drafted_tokens(self) -> int:
        """Drafts that steps verified."""
        return sum(counts.drafted for counts in self.drafters.values())

    @property
    def accepted_tokens(self) -> int:
        """Of these."""
        return sum(counts.accepted for counts in self.drafters.values())

    @property
    def device_idle_share(self) -> float:
        """Share of time, between steps that follow each other, when nothing was on the device."""
        idle = whole = 0.0
        for before, after in self._neighbours():
            pair_idle, pair_whole = after.idle_since(before)
            idle += pair_idle
            whole += pair_whole
        return max(0.0, idle) / whole if whole else 0.0

    @property
    def host_hidden_share(self) -> float:
        """Share of the host's work (planning, building, committing) done while the device works."""
        host = idle = 0.0
        for before, after in self._neighbours():
            host += after.plan_seconds + before.commit_seconds
            idle += after.idle_since(before)[0]
        return 1.0 - min(host, max(0.0, idle)) / host if host else 0.0

    def _neighbours(self) -> list[tuple[StepRecord, StepRecord]]:
        """Steps that followed each other without a pause between them."""
        records = list(self.records)
        pairs = itertools.pairwise(records)
        return [(a, b) for a, b in pairs if b.step == a.step + 1 and not b.after_pause]

    def summary(self) -> dict[str, Any]:
        counts = {name: n for name, n in vars(self).items() if isinstance(n, int)}
        return {
            **counts,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "drafters": {name: asdict(each) for name, each in self.drafters.items()},
            "device_idle_share": round(self.device_idle_share, 4),
            "host_hidden_share": round(self.host_hidden_share, 4),
        }
