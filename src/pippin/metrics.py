"""What each step did and when: the numbers behind "overlap hides the host". Knows no arrays."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW_STEPS = 512  # steps that rates and shares are computed over


@dataclass(frozen=True)
class StepRecord:
    """Times are time.perf_counter() seconds on one clock.

    planned ─── launched ─────────── device_done ─── committed
       host plans │ device works         │ host commits
    """

    step: int
    planned: float  # planning began
    launched: float  # launch returned
    device_done: float  # the result was seen to be ready
    committed: float  # commit returned
    waited: float  # seconds the host was blocked waiting for this step
    prefill_tokens: int
    decode_rows: int
    ghosts: int


@dataclass
class EngineMetrics:
    """Counters since start, and shares over the last `WINDOW_STEPS` steps."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0  # prompt tokens run through the model
    generated_tokens: int = 0
    ghost_rows: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.computed_tokens += record.prefill_tokens
        self.ghost_rows += record.ghosts
        self.records.append(record)

    @property
    def device_idle_share(self) -> float:
        """Share of time, between steps that follow each other, when nothing was on the device.

        A step's device time starts when it is launched or when the one before it is done,
        whichever is later; a gap is the time from one's end to the next one's launch.
        """
        idle = busy = 0.0
        for before, after in zip(self.records, list(self.records)[1:], strict=False):
            if after.step != before.step + 1:
                continue  # the engine had nothing to do in between
            start = max(after.launched, before.device_done)
            idle += max(0.0, after.launched - before.device_done)
            busy += max(0.0, after.device_done - start)
        return idle / (idle + busy) if idle + busy else 0.0

    @property
    def host_hidden_share(self) -> float:
        """Share of the host's own work (planning and committing) done while the device worked."""
        host = exposed = 0.0
        for before, after in zip(self.records, list(self.records)[1:], strict=False):
            if after.step != before.step + 1:
                continue
            work = (after.launched - after.planned) + (before.committed - before.device_done)
            host += work
            exposed += min(work, max(0.0, after.launched - before.device_done))
        return 1.0 - exposed / host if host else 0.0

    def summary(self) -> dict[str, float | int]:
        return {
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "ghost_rows": self.ghost_rows,
            "requests_finished": self.requests_finished,
            "requests_aborted": self.requests_aborted,
            "requests_failed": self.requests_failed,
            "device_idle_share": round(self.device_idle_share, 4),
            "host_hidden_share": round(self.host_hidden_share, 4),
        }
