"""What watchers are told is what happened, and nothing is told or gathered without them."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replica import Replica, Watched

from builders import Client, make_client, make_loop, make_prompt, oracle
from oracle_drafter import OracleDrafter
from pippin.backends.fake import FakeBackend
from pippin.engine.events import tree_mirror
from pippin.engine.events.event_sender import MAX_ROWS, MAX_STEPS
from pippin.engine.events.schema import Frame, Snapshot
from pippin.scheduler.speculation import Speculation
from pippin.types import Component
from trace_events import DEVICE, FIRST_SLOT, HOST, Trace

MAX_MESSAGE_BYTES = 250_000  # docs/internals/events.md


def watched(**options: object) -> Watched:
    one = Watched(make_client(**options))
    one.feed.watch()
    assert one.flush() == 1
    return one


def test_nothing_is_gathered_while_nobody_watches() -> None:
    one = Watched(make_client())
    scheduler = one.client.loop.scheduler
    assert scheduler.cache is not None
    store = scheduler.cache
    one.client.ask(make_prompt(70))
    assert scheduler.observer is None
    assert not store.observers
    assert one.flush() == 0
    assert one.feed.due_in == math.inf
    one.feed.watch()
    assert scheduler.observer is not None
    assert store.observers
    one.feed.unwatch()
    one.client.ask(make_prompt(80))
    assert scheduler.observer is None
    assert not store.observers
    assert one.flush() == 1  # the snapshot for whoever has left


def test_steps_say_what_was_computed_reused_and_sampled() -> None:
    one = watched(num_slots=2, chunk=64)
    prompt = make_prompt(150)
    first = one.client.submit(prompt, max_tokens=5)
    one.run()
    second = one.client.submit(prompt[:140] + [7] * 20, max_tokens=3)
    one.run()
    assert second.cached_tokens is not None
    assert second.cached_tokens > 0
    steps = one.replica.steps
    assert [step.step for step in steps] == list(range(len(steps)))
    chunks = [chunk for step in steps for chunk in step.chunks]
    of_first = [chunk for chunk in chunks if chunk.request == first.id]
    of_second = [chunk for chunk in chunks if chunk.request == second.id]
    assert [(chunk.start, chunk.tokens) for chunk in of_first] == [(0, 64), (64, 64), (128, 22)]
    assert [chunk.samples for chunk in of_first] == [False, False, True]
    assert of_second[0].restored == of_second[0].start == second.cached_tokens
    assert sum(chunk.tokens for chunk in of_second) == 160 - second.cached_tokens
    metrics = one.client.loop.scheduler.metrics
    assert sum(chunk.tokens for chunk in chunks) == metrics.computed_tokens
    assert sum(step.ghosts for step in steps) == metrics.ghost_rows
    assert [id for step in steps for id in step.started] == [first.id, second.id]
    assert sum(len(step.retired) for step in steps) == 2
    assert sum(len(step.decode) for step in steps) == sum(r.decode_rows for r in metrics.records)


def test_steps_say_which_drafts_were_verified_and_accepted() -> None:
    prompt = make_prompt(70)
    drafter = OracleDrafter(lambda request: oracle(prompt, max_tokens=40)[0], 0.7, 97)
    backend = FakeBackend(num_slots=1, max_depth=3)
    speculation = Speculation(drafter, 3, lambda running: 3)
    one = Watched(Client(make_loop(backend=backend, speculation=speculation)))
    one.feed.watch()
    reply = one.client.submit(prompt, max_tokens=40)
    one.run()
    drafts = [draft for step in one.replica.steps for draft in step.drafts]
    assert {slot for slot, _, _ in drafts} == {1}
    assert all(0 <= accepted <= verified <= 3 for _, verified, accepted in drafts)
    accepted = sum(right for _, _, right in drafts)
    assert accepted == reply.accepted_drafts > 0
    assert sum(verified for _, verified, _ in drafts) - accepted == reply.rejected_drafts > 0


def test_a_request_is_told_in_each_of_its_phases() -> None:
    one = watched(num_slots=1, chunk=64)
    one.client.submit(make_prompt(100), id="a", max_tokens=4)
    one.client.submit(make_prompt(40, 1), id="b", max_tokens=2)
    one.flush()
    assert one.replica.phases == {"a": ["waiting"], "b": ["waiting"]}
    one.run()
    assert one.replica.phases["a"] == ["waiting", "prefill", "decode", "ended"]
    told = one.replica.requests["a"]
    assert (told.prompt, told.reply, told.finish, told.slot) == (100, 4, "length", 1)
    assert one.replica.requests["b"].finish == "length"
    assert one.replica.last is not None
    assert one.replica.last.load.finished == 2


def test_progress_counts_what_a_running_request_holds() -> None:
    one = watched(num_slots=1, chunk=64)
    one.client.submit(make_prompt(100), max_tokens=50)
    one.client.step(10)
    one.flush()
    (running,) = one.client.loop.scheduler.running_slots.values()
    assert one.replica.last is not None
    (progress,) = one.replica.last.progress  # type: ignore[union-attr]
    assert (progress.slot, progress.held) == (running.slot, running.row_len)
    assert progress.reply == len(running.request.output) > 0


def test_a_request_that_is_preempted_waits_again() -> None:
    kinds = (Component.ATTENTION,)
    capacity = 3 * FakeBackend(components=kinds).row_bytes(10 + 256)
    client = make_client(num_slots=4, chunk=512, components=kinds, capacity_bytes=capacity)
    one = Watched(client)
    one.feed.watch()
    for number in range(4):
        client.submit(make_prompt(10, number), max_tokens=600)
    one.run()
    assert client.loop.scheduler.metrics.preemptions > 0
    preempted = [id for step in one.replica.steps for id in step.preempted]
    assert len(preempted) == client.loop.scheduler.metrics.preemptions
    assert "waiting" in one.replica.phases[preempted[0]][1:]
    request = one.replica.requests[preempted[0]]
    assert request.preemptions > 0


@pytest.mark.parametrize(
    "components",
    [
        (Component.ATTENTION,),
        (Component.ATTENTION, Component.STATE),
        (Component.ATTENTION, Component.WINDOW, Component.STATE),
    ],
    ids=lambda kinds: "+".join(kind.value for kind in kinds),
)
@pytest.mark.parametrize("max_nodes", [512, 12], ids=["all of it", "a part"])
def test_the_tree_that_is_told_is_the_tree(
    components: tuple[Component, ...], max_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_mirror, "MAX_NODES", max_nodes)
    monkeypatch.setattr(tree_mirror, "NUM_KEPT", max_nodes * 3 // 4)
    rng = random.Random(7)
    capacity = 4 * FakeBackend(components=components).row_bytes(400)
    client = make_client(num_slots=3, chunk=128, components=components, capacity_bytes=capacity)
    for number in range(3):
        client.ask(make_prompt(200, number))
    one = Watched(client)
    one.feed.watch()
    late = Replica()
    for turn in range(60):
        length = rng.randrange(1, 300)
        prompt = make_prompt(length, rng.randrange(3)) + make_prompt(rng.randrange(60), turn)
        client.submit(prompt, max_tokens=rng.randrange(1, 40))
        client.step(rng.randrange(12))
        if turn == 40:
            client.loop.flush_cache()
        if turn == 30:  # somebody else comes, and is told the same
            one.feed.watch()
        one.flush(rng.choice([0.02, 0.2]))
        one.flush(0.11)
        one.replica.check(client, complete=max_nodes == 512)
        assert len(one.replica.nodes) <= max_nodes
    one.run()
    one.replica.check(client, complete=max_nodes == 512)
    assert one.replica.evicted
    one.feed.watch()
    one.now += 1
    one.feed.flush()
    assert one.messages[-1].kind == "snapshot"
    late.take(one.messages[-1])
    assert late.nodes.keys() == one.replica.nodes.keys()
    late.check(client, complete=max_nodes == 512)


def test_at_most_ten_messages_come_in_a_second() -> None:
    one = watched(num_slots=4)
    num_messages = 0
    for number in range(200):
        one.client.submit(make_prompt(20, number), max_tokens=4)
        one.client.step()
        one.feed.watch()
        num_messages += one.flush(0.005)
    assert 8 <= num_messages / 2 <= 10  # each time a frame and a snapshot, which others skip


def test_what_is_left_is_told_when_it_is_due() -> None:
    one = watched()
    one.client.ask(make_prompt(20))
    assert one.flush(0.0) == 1
    one.client.ask(make_prompt(30))
    assert one.flush(0.01) == 0
    assert one.feed.due_in == pytest.approx(0.09)
    assert one.flush(one.feed.due_in + 1e-6) == 1
    assert one.feed.due_in == math.inf
    assert one.flush() == 0  # nothing is new


@pytest.mark.slow
def test_messages_are_bounded_in_bytes() -> None:
    one = watched(num_slots=256, chunk=8192, max_queue=2000)
    for number in range(600):
        one.client.submit(make_prompt(330, number), id=f"chatcmpl-{number:032x}-0", max_tokens=20)
    one.client.run()
    assert one.client.loop.scheduler.cache is not None
    assert one.client.loop.scheduler.cache.radix.num_nodes > 4 * tree_mirror.MAX_NODES
    one.feed.watch()
    one.now += 1
    one.feed.flush()
    assert [message.kind for message in one.messages] == ["frame", "snapshot"]
    assert max(len(message.json) for message in one.messages) < MAX_MESSAGE_BYTES
    frame = msgspec.json.decode(one.messages[0].json, type=Frame)
    assert sum(len(step.decode) for step in frame.steps) <= MAX_ROWS
    assert frame.left_out > 0


def test_steps_that_are_too_many_are_counted() -> None:
    one = watched()
    one.client.submit(make_prompt(20), max_tokens=3 * MAX_STEPS)
    while not one.client.loop.idle:
        one.client.step()
    one.flush()
    frame = one.replica.last
    assert frame is not None
    assert len(frame.steps) == MAX_STEPS
    assert frame.left_out == frame.steps[0].step  # type: ignore[union-attr]
    one.feed.watch()
    one.flush()
    assert [step.step for step in one.replica.steps] == [step.step for step in frame.steps]


def test_without_a_prefix_cache_there_is_no_tree() -> None:
    one = watched(cache=False)
    one.client.submit(make_prompt(20))
    one.run()
    assert one.replica.last is not None
    assert one.replica.last.tree is None
    assert one.replica.last.memory.tree == {}
    assert one.feed.node(1) == {}


def test_the_tokens_of_a_node_are_told_to_whoever_asks() -> None:
    one = watched()
    prompt = make_prompt(90)
    one.client.submit(prompt, max_tokens=1)
    one.run()
    told = [one.feed.node(id) for id in sorted(one.replica.nodes)]
    tokens = sorted((node["start"], node["tokens"]) for node in told)
    assert [token for _, part in tokens for token in part][:90] == prompt
    assert one.feed.node(12345) == {}
    one.feed.unwatch()
    assert one.feed.node(min(one.replica.nodes)) == {}


def test_memory_adds_up_while_requests_run() -> None:
    one = watched(num_slots=3, chunk=64, capacity_bytes=200_000)
    for number in range(6):
        one.client.submit(make_prompt(150, number), max_tokens=80)
    while not one.client.loop.idle:
        one.client.step()
        one.flush(0.11)
        assert one.replica.last is not None
        memory = one.replica.last.memory
        held = (
            memory.rows
            + memory.checkpoints
            + memory.captures
            + memory.loads
            + sum(memory.tree.values())
        )
        assert memory.capacity == held + memory.free
        assert memory.captures >= 0


def test_a_node_says_when_all_of_it_is_on_disk_too() -> None:
    one = watched(components=(Component.ATTENTION, Component.STATE))
    prompt = make_prompt(70)
    one.client.submit(prompt, max_tokens=1)
    one.run()
    cache = one.client.loop.scheduler.cache
    assert cache is not None
    held = {node.start + node.tokens: node for node in one.replica.nodes.values()}
    assert {node.tier for node in held.values()} == {"device"}
    end = max(held)
    tokens = (prompt + one.client.replies["r0"].tokens)[:end]
    cache.mark_copied(tokens, [(Component.ATTENTION, 0, len(tokens))])
    one.flush()
    assert {node.tier for node in one.replica.nodes.values() if "state" in node.bytes} == {"device"}
    cache.mark_copied(tokens, [(Component.STATE, 0, len(tokens))])
    one.flush()
    told = {node.start + node.tokens: node.tier for node in one.replica.nodes.values()}
    assert told[end] == "disk"


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


def test_a_trace_of_it_has_lanes_that_do_not_overlap() -> None:
    trace = Trace()
    events = [event for message in decoded() for event in trace.take(message)]
    lanes: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append(event)
    assert {HOST, DEVICE, FIRST_SLOT + 1} <= lanes.keys()
    for slices in lanes.values():
        for before, after in pairwise(sorted(slices, key=lambda each: each["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 2, (before, after)
    assert len(lanes[DEVICE]) == sum(len(message.steps) for message in decoded())
    waits = [event["ph"] for event in events if event.get("cat") == "queue"]
    assert waits.count("b") == waits.count("e") > 0
