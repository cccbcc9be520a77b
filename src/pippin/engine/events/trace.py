"""Steps and requests as a file in Chrome's trace format, which Perfetto opens.

    host      plan ▏ wait ▏ commit ▏ messages ▏ plan ...     every moment is in exactly one slice
    device    idle ▏ step 7 ▏ step 8 ▏ idle ...              likewise
    slot 1    prefill ▏ decode                               of the request in the slot
    queue     from arrival to start                          side by side

The server writes the head of the file, engines append to it, each as a process of its own. JSON's
closing bracket is written last, and readers do not need it: a killed server's file can be read.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pippin.engine.events.schema import Phase, RequestEvent, StepEvent
from pippin.errors import LoadError

if TYPE_CHECKING:
    from pippin.engine.events.recorder import Recorder

MAX_BYTES = 200_000_000  # a browser holds several times as much when it has read them
HOST, DEVICE, QUEUE, FIRST_SLOT = 1, 2, 3, 10  # lanes, in this order

WORK = ("chunks", "decode", "drafts", "ghosts", "captures", "loads", "spills", "forwards", "seen")

Event = dict[str, Any]
logger = logging.getLogger(__name__)


class TraceFile:
    """A JSON array that grows by events, up to a limit."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Append to what `begin` has made."""
        self._path = path
        self._left = max_bytes - path.stat().st_size
        self._file = path.open("ab", buffering=0)
        self._over = False

    @staticmethod
    def begin(path: Path) -> None:
        """Make the file, or empty it."""
        head: Event = {"ph": "M", "name": "trace_format", "pid": 0, "args": {"by": "pippin"}}
        try:
            path.write_bytes(b"[\n" + msgspec.json.encode(head))
        except OSError as error:
            raise LoadError(f"cannot write a trace: {error}") from error

    def write(self, events: list[Event]) -> None:
        if self._over or not events:
            return
        lines = b"".join(b",\n" + msgspec.json.encode(event) for event in events)
        self._left -= len(lines)
        if self._left < 0:
            self._over = True
            logger.warning("the trace %s is full: nothing more is written to it", self._path)
            return
        self._append(lines)

    def close(self) -> None:
        self._append(b"\n]\n")
        self._file.close()

    def _append(self, data: bytes) -> None:
        """A disk that is full, or gone, ends the trace and nothing else."""
        try:
            self._file.write(data)
        except OSError as error:
            self._over = True
            logger.warning("the trace %s ends here: %s", self._path, error)


class _Slice(NamedTuple):
    """A stretch of a lane, in seconds of the recorder's clock."""

    begins: float
    ends: float
    name: str
    args: Event
    gap: str = "messages"  # what a lane did before it, where nothing else is known


class TraceWriter:
    """A recorder's sink."""

    def __init__(self, file: TraceFile, recorder: Recorder, *, num_slots: int) -> None:
        self._file = file
        self._recorder = recorder
        self._pid = os.getpid()
        self._is_lost = False
        self._ends: dict[int, float] = {}  # of the host's and the device's lane, so far
        self._held_back: list[_Slice] = []  # of the host; the next step's plan may come before them
        self._committed = 0.0
        self._running: dict[str, tuple[Phase, float, int]] = {}  # phase, since when, slot
        self._waiting: set[str] = set()
        lanes = {HOST: "host", DEVICE: "device", QUEUE: "queue"}
        lanes |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(1, num_slots + 1)}
        process = {"name": f"pippin engine {self._pid}"}
        file.write([self._event("M", "process_name", 0, args=process)])
        for lane, name in lanes.items():
            named = self._event("M", "thread_name", lane, args={"name": name})
            placed = self._event("M", "thread_sort_index", lane, args={"sort_index": lane})
            file.write([named, placed])
        recorder.add(self)

    def lost(self) -> None:
        """What was written so far can be read."""
        self._is_lost = True
        self._file.close()

    def close(self) -> None:
        """Write what was held back; both lanes end together."""
        if self._is_lost:
            return
        self._recorder.remove(self)
        events = [event for one in self._held_back for event in self._follow(HOST, one)]
        self._file.write(events + self._fill(DEVICE, self._committed, "idle"))
        self._file.close()

    # ---- the recorder's sink -------------------------------------------------------------------

    def step(self, step: StepEvent) -> None:
        plan = _Slice(
            step.planned,
            step.launched,
            f"plan {step.step}",
            {"started": step.started, "preempted": step.preempted},
            "idle" if step.after_pause else "messages",
        )
        known = sorted([*self._held_back, plan], key=lambda one: one.begins)
        self._held_back = [
            _Slice(step.resumed - step.waited, step.resumed, f"wait {step.step}", {}),
            _Slice(step.resumed, step.committed, f"commit {step.step}", {"ghosts": step.ghosts}),
        ]
        self._committed = step.committed
        events = [event for one in known for event in self._follow(HOST, one)]
        self._ends.setdefault(DEVICE, step.planned)
        args = {name: getattr(step, name) for name in WORK}
        work = _Slice(step.dispatched, step.done, f"step {step.step}", args, "idle")
        events += self._follow(DEVICE, work)
        tokens = sum(chunk.tokens for chunk in step.chunks)
        counts = {"decode rows": len(step.decode), "prompt tokens": tokens}
        events.append(self._event("C", "work", 0, step.dispatched, args=counts))
        self._file.write(events)

    def request(self, request: RequestEvent) -> None:
        now = self._recorder.now
        events = self._wait(request, now)
        was = self._running.pop(request.id, None)
        if was is not None:
            phase, since, slot = was
            ends = request.ended if request.phase == "ended" else request.first_token
            if ends is None or ends < since:  # preempted, or resumed after its first token
                ends = now
            args = {"prompt": request.prompt, "cached": request.cached, "reply": request.reply}
            name = f"{phase} {request.id}"
            events.append(self._slice(_Slice(since, ends, name, args), FIRST_SLOT + slot))
        if request.phase in ("prefill", "decode") and request.slot is not None:
            first = request.started if request.phase == "prefill" else request.first_token
            since = now if request.preemptions or first is None else first
            self._running[request.id] = (request.phase, since, request.slot)
        self._file.write(events)

    # ---- events --------------------------------------------------------------------------------

    def _follow(self, lane: int, one: _Slice) -> list[Event]:
        """The slice behind those before it, and one for the time between."""
        begins = max(one.begins, self._ends.get(lane, one.begins))
        before = self._fill(lane, begins, one.gap)
        ends = self._ends[lane] = max(begins, one.ends)
        return [*before, self._slice(one._replace(begins=begins, ends=ends), lane)]

    def _fill(self, lane: int, until: float, name: str) -> list[Event]:
        begins = self._ends.get(lane, until)
        self._ends[lane] = max(begins, until)
        return [self._slice(_Slice(begins, until, name, {}), lane)] if until > begins else []

    def _wait(self, request: RequestEvent, now: float) -> list[Event]:
        """Its time in the queue starts or ends."""
        waits = request.phase in ("compiling", "waiting", "loading")
        if waits == (request.id in self._waiting):
            return []
        (self._waiting.add if waits else self._waiting.remove)(request.id)
        at = now
        if not request.preemptions and request.phase != "ended":
            at = request.arrived if waits or request.started is None else request.started
        phase = "b" if waits else "e"
        return [self._event(phase, "waits", QUEUE, at, cat="queue", id=request.id)]

    def _slice(self, one: _Slice, lane: int) -> Event:
        duration = self._us(one.ends) - self._us(one.begins)
        return self._event("X", one.name, lane, one.begins, dur=duration, args=one.args)

    def _event(self, ph: str, name: str, lane: int, at: float | None = None, **more: Any) -> Event:
        when = {} if at is None else {"ts": self._us(at)}
        return {"ph": ph, "name": name, **when, "pid": self._pid, "tid": lane, **more}

    def _us(self, seconds: float) -> int:
        """Microseconds on the machine's clock, which all engines share."""
        return round((self._recorder.zero + seconds) * 1e6)
