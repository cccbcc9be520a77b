"""A trace is valid JSON, and its lanes hold every moment once; also if its server was killed."""

from __future__ import annotations

import io
import json
import logging
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from builders import Client, loop_clock, make_prompt, make_scheduler
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakePending
from pippin.engine.events.recorder import Recorder
from pippin.engine.events.trace import DEVICE, FIRST_SLOT, HOST, TraceFile, TraceWriter
from pippin.errors import LoadError
from pippin.scheduler.loop import Loop
from timed import TWO_CORES, TimedBackend

HOST_SECONDS = 0.001
PAUSE_SECONDS = 2.5
Lanes = dict[int, list[dict[str, Any]]]


class SlowHost(TimedBackend):
    """Planning and launching takes time, too."""

    work_seconds = 0.0  # of the device

    def launch(self, plan: StepPlan) -> FakePending:
        self.now += HOST_SECONDS
        self.work_seconds += self.costs.seconds(len(plan.decode), plan.num_prefill_tokens)
        return super().launch(plan)


class Traced:
    """A mixed run with a trace: prompts beside streams, a pause, and more than there are slots."""

    def __init__(self, path: Path, *, overlap: bool = True, max_bytes: int = 1 << 30) -> None:
        TraceFile.begin(path)
        self.path = path
        self.backend = SlowHost(TWO_CORES)
        scheduler = make_scheduler(self.backend, num_slots=3, chunk=128)
        self.client = Client(Loop(scheduler, self.backend, overlap=overlap))
        recorder = Recorder(scheduler, lambda: self.backend.now)
        file = TraceFile(path, max_bytes=max_bytes)
        self.writer = TraceWriter(file, recorder, num_slots=3)

    def run(self) -> None:
        with loop_clock(self.backend):
            for number in range(5):
                prompt = make_prompt(60 + 150 * number, number % 2)
                self.client.submit(prompt, max_tokens=10 + number)
            self.client.run()
            self.backend.now += PAUSE_SECONDS
            self.client.ask(make_prompt(300), max_tokens=8)

    def close(self) -> Lanes:
        self.writer.close()
        return lanes_of(json.loads(self.path.read_bytes()))


def lanes_of(events: list[dict[str, Any]]) -> Lanes:
    lanes: Lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["tid"]].append(event)
    return lanes


def ends(event: dict[str, Any]) -> int:
    return int(event["ts"] + event["dur"])


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_lanes_do_not_overlap_and_add_up_to_the_wall_time(tmp_path: Path, overlap: bool) -> None:
    traced = Traced(tmp_path / "trace.json", overlap=overlap)
    traced.run()
    lanes = traced.close()
    assert {HOST, DEVICE, FIRST_SLOT + 1, FIRST_SLOT + 2, FIRST_SLOT + 3} == lanes.keys()
    for slices in lanes.values():
        for before, after in pairwise(sorted(slices, key=lambda event: event["ts"])):
            assert ends(before) <= after["ts"]
    wall = round(traced.backend.now * 1e6)
    for lane in (HOST, DEVICE):
        assert sum(event["dur"] for event in lanes[lane]) == wall
    steps = traced.client.loop.scheduler.metrics.steps
    by_name: dict[str, int] = defaultdict(int)  # microseconds; each slice may be off by one
    for lane in (HOST, DEVICE):
        for event in lanes[lane]:
            by_name[f"{lane} {event['name'].split()[0]}"] += event["dur"]
    plans = by_name[f"{HOST} plan"]
    assert plans == pytest.approx(steps * HOST_SECONDS * 1e6, abs=steps)
    assert by_name[f"{HOST} idle"] == pytest.approx(PAUSE_SECONDS * 1e6, abs=1)
    # This host does nothing but plan, wait and pause.
    waits = wall - plans - PAUSE_SECONDS * 1e6
    assert by_name[f"{HOST} wait"] == pytest.approx(waits, abs=2 * steps)
    work = traced.backend.work_seconds * 1e6
    assert by_name[f"{DEVICE} step"] == pytest.approx(work, abs=2 * steps)
    assert by_name[f"{DEVICE} idle"] == pytest.approx(wall - work, abs=2 * steps)


def test_slices_say_what_steps_held(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "trace.json")
    traced.run()
    work = [event["args"] for event in traced.close()[DEVICE] if event["name"] != "idle"]
    metrics = traced.client.loop.scheduler.metrics
    assert len(work) == metrics.steps
    chunks = [chunk for step in work for chunk in step["chunks"]]
    assert sum(chunk["tokens"] for chunk in chunks) == metrics.computed_tokens
    assert sum(step["ghosts"] for step in work) == metrics.ghost_rows


def test_a_request_has_its_slot_from_its_start_to_its_end(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "trace.json")
    traced.run()
    lanes = traced.close()
    slots = [lanes[lane] for lane in lanes if lane > FIRST_SLOT]
    phases = sorted(event["name"] for slices in slots for event in slices)
    ids = sorted(traced.client.replies)
    assert phases == sorted(f"{phase} {id}" for phase in ("prefill", "decode") for id in ids)
    events = json.loads(traced.path.read_bytes())
    waits = [(event["ph"], event["id"]) for event in events if event.get("cat") == "queue"]
    assert sorted(waits) == sorted((ph, id) for ph in "be" for id in ids)


def test_a_file_that_was_not_closed_lacks_its_end_alone(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "trace.json")
    traced.run()
    traced.writer._file._file.close()  # as a process does that dies
    left = traced.path.read_bytes()
    assert lanes_of(json.loads(left + b"]"))[DEVICE]
    second = TraceFile(traced.path)  # another engine goes on
    second.write([{"ph": "M", "name": "more"}])
    second.close()
    events = json.loads(traced.path.read_bytes())
    assert events[-1]["name"] == "more"
    assert len(events) == len(json.loads(left + b"]")) + 1


def test_a_trace_is_bounded_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    traced = Traced(tmp_path / "trace.json", max_bytes=10_000)
    with caplog.at_level(logging.WARNING):
        traced.run()
    assert [record.getMessage() for record in caplog.records] == [
        f"the trace {traced.path} is full: nothing more is written to it"
    ]
    traced.close()  # which reads it
    assert 5_000 < traced.path.stat().st_size < 10_100


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    traced = Traced(tmp_path / "trace.json")
    traced.writer._file._file.close()
    traced.writer._file._file = FullDisk(tmp_path / "full", "w")
    traced.run()
    traced.writer._file._file.close()
    assert all(reply.finish == "length" for reply in traced.client.replies.values())
    [said] = [record.getMessage() for record in caplog.records]
    assert "ends here" in said
    assert "No space left" in said


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"cannot write a trace: .*nowhere"):
        TraceFile.begin(tmp_path / "nowhere" / "trace.json")
