"""The events of a running server as a file in Chrome's trace format, which Perfetto opens.

python tools/bench/trace_events.py http://127.0.0.1:8000 trace.json      until Ctrl-C

host      plan ▏ wait ▏ commit          what lies between is not of any step
device    step 7 ▏ step 8               from its launch, or from the end of the step before
slot 1    prefill ▏ decode              of the request in the slot, once it has ended
queue     from arrival to start         side by side
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pippin.engine.events.schema import Frame, RequestEvent, Snapshot, StepEvent

HOST, DEVICE, QUEUE, FIRST_SLOT = 1, 2, 3, 10  # lanes, in this order
WORK = ("chunks", "decode", "drafts", "ghosts", "captures", "loads", "spills", "forwards", "seen")
KINDS: dict[str, type[Snapshot | Frame]] = {"snapshot": Snapshot, "frame": Frame}

Event = dict[str, Any]


class Trace:
    """Each engine is a process of its own: its clock starts at its snapshot's `began`."""

    def __init__(self) -> None:
        self._engine = 0
        self._began: float | None = None
        self._device_end = 0.0

    def take(self, message: Snapshot | Frame) -> Iterator[Event]:
        if isinstance(message, Snapshot):
            if message.began == self._began:  # steps that were skipped, or that were seen before
                return
            self._engine, self._began, self._device_end = self._engine + 1, message.began, 0.0
            yield from self._names(message)
        for step in message.steps:
            yield from self._step(step)
        for request in message.requests:
            if request.phase == "ended":
                yield from self._request(request)

    def _names(self, snapshot: Snapshot) -> Iterator[Event]:
        name = f"engine {self._engine} on {snapshot.device}"
        yield self._event("M", "process_name", 0, args={"name": name})
        lanes = {HOST: "host", DEVICE: "device", QUEUE: "queue"}
        lanes |= {FIRST_SLOT + slot: f"slot {slot}" for slot in range(1, snapshot.slots + 1)}
        for lane, name in lanes.items():
            yield self._event("M", "thread_name", lane, args={"name": name})
            yield self._event("M", "thread_sort_index", lane, args={"sort_index": lane})

    def _step(self, step: StepEvent) -> Iterator[Event]:
        moved = {"started": step.started, "preempted": step.preempted}
        yield self._slice(HOST, f"plan {step.step}", step.planned, step.launched, **moved)
        yield self._slice(HOST, f"wait {step.step}", step.resumed - step.waited, step.resumed)
        yield self._slice(HOST, f"commit {step.step}", step.resumed, step.committed)
        begins = max(step.dispatched, self._device_end)
        self._device_end = max(step.done, begins)
        work = {name: msgspec.to_builtins(getattr(step, name)) for name in WORK}
        yield self._slice(DEVICE, f"step {step.step}", begins, self._device_end, **work)
        tokens = sum(chunk.tokens for chunk in step.chunks)
        counts = {"decode rows": len(step.decode), "prompt tokens": tokens}
        yield self._event("C", "work", 0, step.dispatched, args=counts)

    def _request(self, request: RequestEvent) -> Iterator[Event]:
        ended = request.arrived if request.ended is None else request.ended
        started = ended if request.started is None else request.started
        first = ended if request.first_token is None else request.first_token
        for kind, at in (("b", request.arrived), ("e", started)):
            yield self._event(kind, "waits", QUEUE, at, cat="queue", id=request.id)
        if request.slot is None:
            return
        lane = FIRST_SLOT + request.slot
        counts = {"prompt": request.prompt, "cached": request.cached, "reply": request.reply}
        yield self._slice(lane, f"prefill {request.id}", started, first, **counts)
        yield self._slice(lane, f"decode {request.id}", first, ended, **counts)

    def _slice(self, lane: int, name: str, begins: float, ends: float, **args: Any) -> Event:
        duration = max(self._us(ends) - self._us(begins), 0)
        return self._event("X", name, lane, begins, dur=duration, args=args)

    def _event(self, ph: str, name: str, lane: int, at: float | None = None, **more: Any) -> Event:
        when = {} if at is None else {"ts": self._us(at)}
        return {"ph": ph, "name": name, **when, "pid": self._engine, "tid": lane, **more}

    def _us(self, seconds: float) -> int:
        return round(((self._began or 0.0) + seconds) * 1e6)


def messages(lines: Iterable[str]) -> Iterator[Snapshot | Frame]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name in KINDS:
            yield msgspec.json.decode(line.removeprefix("data: "), type=KINDS[name])


def write_trace(url: str, path: Path) -> None:
    key = os.environ.get("PIPPIN_ADMIN_KEY") or os.environ.get("PIPPIN_API_KEY", "")
    headers = {"Authorization": f"Bearer {key.split()[0]}"} if key else {}
    trace = Trace()
    with httpx.stream("GET", f"{url}/events", headers=headers, timeout=None) as reply:
        reply.raise_for_status()
        with path.open("w") as file:
            file.write("[\n")  # readers do not need the closing bracket
            for message in messages(reply.iter_lines()):
                file.writelines(json.dumps(event) + ",\n" for event in trace.take(message))
                file.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="Address of the server.")
    parser.add_argument("file", type=Path, help="File to write.")
    given = parser.parse_args()
    with suppress(KeyboardInterrupt):
        write_trace(given.url, given.file)
