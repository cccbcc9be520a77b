"""The recorded sample is what the schema says: whoever reads the feed can be built against it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from pippin.engine.events.schema import Frame, Snapshot

SAMPLE = Path(__file__).parent / "sample.events"


def recorded() -> list[tuple[str, bytes]]:
    events = [event.split(b"\n") for event in SAMPLE.read_bytes().split(b"\n\n") if event]
    names = [lines[0].removeprefix(b"event: ").decode() for lines in events]
    return list(zip(names, [lines[1].removeprefix(b"data: ") for lines in events], strict=True))


def decoded() -> list[Any]:
    kinds: dict[str, type[Snapshot | Frame]] = {"snapshot": Snapshot, "frame": Frame}
    return [msgspec.json.decode(json, type=kinds[name]) for name, json in recorded()]


def test_every_message_has_the_fields_of_its_type_and_no_others() -> None:
    assert [name for name, _ in recorded()] == ["snapshot"] + ["frame"] * (len(recorded()) - 1)
    for (_, json), message in zip(recorded(), decoded(), strict=True):
        assert msgspec.json.decode(json) == msgspec.to_builtins(message)


def test_frames_count_on_from_the_snapshot() -> None:
    numbers = [message.number for message in decoded()]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_memory_adds_up() -> None:
    for message in decoded():
        memory = message.memory
        held = (
            memory.rows
            + memory.checkpoints
            + memory.captures
            + memory.loads
            + sum(memory.tree.values())
        )
        assert held + memory.free == memory.capacity


def test_the_hosts_lane_does_not_overlap_itself() -> None:
    steps = [step for message in decoded() for step in message.steps]
    spans = [(step.planned, step.launched) for step in steps]
    spans += [(step.resumed - step.waited, step.committed) for step in steps]
    for before, after in pairwise(sorted(spans)):
        assert before[0] <= before[1] <= after[0] + 2e-6  # times are told to the microsecond


def test_it_shows_a_prompt_that_was_reused() -> None:
    messages = decoded()
    chunks = [c for message in messages for step in message.steps for c in step.chunks]
    assert any(chunk.restored for chunk in chunks)
    ended = [r for message in messages for r in message.requests if r.phase == "ended"]
    assert {request.finish for request in ended} == {"length"}
    assert any(request.cached == request.prompt for request in ended)
