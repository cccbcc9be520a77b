"""Grammar rows: the forward is launched first, the mask follows, and nobody else waits."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from builders import Client, ToyGrammar, check_idle, make_client, make_loop, make_prompt, oracle
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending
from pippin.scheduler.replies import NUM_THREADS

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


class RecordingBackend(FakeBackend):
    """Writes down what the loop asks for, in order."""

    def __init__(self) -> None:
        super().__init__(num_slots=8)
        self.events: list[str] = []

    def launch(self, plan: StepPlan) -> FakePending:
        self.events.append(f"launch {plan.step}")
        return RecordingPending(**vars(super().launch(plan)), events=self.events)


@dataclass
class RecordingPending(FakePending):
    events: list[str] = field(default_factory=list)

    def sample(self, masks: np.ndarray) -> None:
        self.events.append(f"sample {self.plan.step}")
        super().sample(masks)

    def wait(self) -> StepResult:
        self.events.append(f"wait {self.plan.step}")
        return super().wait()


def make_recording_client(overlap: bool = True, **kwargs: Any) -> tuple[Client, list[str]]:
    backend = RecordingBackend()
    return Client(make_loop(backend=backend, overlap=overlap, **kwargs)), backend.events


@both_modes
def test_a_grammar_rows_tokens_obey_it_from_the_first_one(overlap: bool) -> None:
    client, _ = make_recording_client(overlap)
    reply = client.ask(make_prompt(70), grammar=ToyGrammar(5), max_tokens=20)
    assert [token % 5 for token in reply.tokens] == [(n + 1) % 5 for n in range(20)]
    expected = oracle(make_prompt(70), grammar=ToyGrammar(5), max_tokens=20)
    assert (reply.tokens, reply.finish) == expected
    check_idle(client)


def test_the_next_forward_is_launched_before_the_last_token_is_known() -> None:
    """launch N+1, wait for N, advance the grammar, sample N+1: the forward hides the host."""
    client, events = make_recording_client()
    grammar = ToyGrammar(calls=events)
    client.submit(make_prompt(5), grammar=grammar, max_tokens=3)
    client.step(3)
    assert events == [
        *["launch 0", "mask", "sample 0"],
        *["launch 1", "wait 0", "advance", "mask", "sample 1"],
        *["launch 2", "wait 1", "advance", "mask", "sample 2"],
    ]


def test_other_rows_of_the_batch_do_not_wait_for_a_mask() -> None:
    """The plain row's token is on the device's queue at launch: it is there before any mask."""
    backend = FakeBackend(num_slots=8)
    client = Client(make_loop(backend=backend))
    client.submit(make_prompt(5, 1), id="plain")
    client.submit(make_prompt(5, 2), id="grammar", grammar=ToyGrammar())
    slots = {"plain": 1, "grammar": 2}
    plan = client.loop.scheduler.plan()
    assert plan is not None
    assert plan.masked_slots == (slots["grammar"],)
    pending = backend.launch(plan)
    backend.device_queue.advance(100)
    assert pending.tokens == {slots["plain"]: tuple(oracle(make_prompt(5, 1))[0][:1])}
    assert not pending.done()
    pending.sample(client.loop.scheduler.masks(plan))
    assert set(pending.wait().tokens) == {1, 2}
    assert pending.done()


def test_a_plan_without_grammar_rows_is_sampled_at_its_launch() -> None:
    client, events = make_recording_client()
    client.ask(make_prompt(5))
    assert not [event for event in events if event.startswith("sample")]


def test_a_ghost_does_not_move_its_grammar() -> None:
    client, events = make_recording_client()
    tokens = oracle(make_prompt(5), grammar=ToyGrammar(), max_tokens=9)[0]
    grammar = ToyGrammar(calls=events)
    reply = client.ask(make_prompt(5), grammar=grammar, max_tokens=9, stop_ids=[tokens[3]])
    assert reply.tokens == tokens[:4]
    assert events.count("advance") == 4
    assert client.loop.scheduler.metrics.ghost_rows == 1


# ---- slow grammars: threads follow these -----------------------------------------------------


@dataclass
class Slow(ToyGrammar):
    """Slow from its `slow_from`th mask on; each mask behind the `blocks_from`th waits."""

    slow_from: int = 0
    blocks_from: int = 3
    go_on: threading.Event = field(default_factory=threading.Event)
    num_masks: int = 0
    num_awaited: int = 0  # masks that the engine's thread made

    def fill_mask(self, mask: np.ndarray) -> None:
        self.num_masks += 1
        self.slow = self.num_masks > self.slow_from
        self.num_awaited += threading.current_thread() is threading.main_thread()
        if self.num_masks > self.blocks_from:
            assert self.go_on.wait(60)
        super().fill_mask(mask)


def block(client: Client, *grammars: Slow) -> None:
    """Step until each of these grammars waits, or is in line for a thread."""
    following = client.loop.scheduler.grammars
    for _ in range(1000):
        client.step()
        waiting = [r for r in following.pending if r.grammar in grammars]
        busy = sum(grammar.num_masks > grammar.blocks_from for grammar in grammars)
        if len(waiting) == len(grammars) and busy == min(len(grammars), NUM_THREADS):
            return
        time.sleep(0.001)
    raise AssertionError("the grammars never blocked")


@both_modes
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"slow": True}, {"slow_from": 2}, {"run": 5}, {"run": 5, "length": 20}],
    ids=["slow early", "slow", "slow later", "forced", "whole"],
)
def test_others_go_on_while_a_slow_mask_is_made(
    overlap: bool, deterministic: bool, kwargs: dict[str, Any]
) -> None:
    client = make_client(overlap=overlap, deterministic=deterministic)
    grammar = Slow(5, **kwargs)
    slow = client.submit(make_prompt(70), grammar=grammar, max_tokens=40)
    other = client.submit(make_prompt(20, 1), max_tokens=2000)
    block(client, grammar)
    before = len(slow.tokens), len(other.tokens)
    client.step(50)
    assert len(slow.tokens) == before[0] < 40
    assert len(other.tokens) >= before[1] + 49
    grammar.go_on.set()
    client.run()
    toy = ToyGrammar(5, run=grammar.run, length=grammar.length)
    assert (slow.tokens, slow.finish) == oracle(make_prompt(70), grammar=toy, max_tokens=40)
    assert (other.tokens, other.finish) == oracle(make_prompt(20, 1), max_tokens=2000)
    # One row may be in flight when it becomes slow.
    assert grammar.num_awaited <= grammar.slow_from + 2
    check_idle(client)


@both_modes
def test_more_slow_grammars_than_threads_wait_for_each_other_alone(overlap: bool) -> None:
    client = make_client(overlap=overlap, num_slots=8)
    grammars = [Slow(5) for _ in range(NUM_THREADS + 2)]
    replies = [
        client.submit(make_prompt(30, number), grammar=grammar, max_tokens=9)
        for number, grammar in enumerate(grammars)
    ]
    block(client, *grammars)
    other = client.submit(make_prompt(20, 99), grammar=ToyGrammar(4), max_tokens=20)
    client.step(40)
    assert other.finish == "length"
    assert not any(reply.finish for reply in replies)
    for grammar in grammars:
        grammar.go_on.set()
    client.run()
    for number, reply in enumerate(replies):
        assert (
            reply.tokens == oracle(make_prompt(30, number), grammar=ToyGrammar(5), max_tokens=9)[0]
        )
    check_idle(client)


@both_modes
@pytest.mark.parametrize("leaves_by", ["abort", "finish"])
def test_a_client_may_leave_while_a_slow_mask_is_made(overlap: bool, leaves_by: str) -> None:
    client = make_client(overlap=overlap)
    grammar = Slow(5)
    reply = client.submit(make_prompt(70), grammar=grammar, max_tokens=40)
    block(client, grammar)
    getattr(client.loop, leaves_by)(reply.id)
    client.run()
    assert reply.finish == ("abort" if leaves_by == "abort" else "stop")
    check_idle(client)
    grammar.go_on.set()


@both_modes
def test_a_reply_that_waits_for_a_slow_mask_may_be_preempted(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    grammar = Slow(5, run=3)
    reply = client.submit(make_prompt(70), grammar=grammar, max_tokens=40)
    block(client, grammar)
    scheduler = client.loop.scheduler
    (running,) = scheduler.running
    scheduler.preempt(running)
    client.step(4)
    assert scheduler.num_waiting == 1
    assert not scheduler.admission.queue
    grammar.go_on.set()
    client.run()
    expected = oracle(make_prompt(70), grammar=ToyGrammar(5, run=3), max_tokens=40)
    assert (reply.tokens, reply.finish) == expected
    check_idle(client)


def test_a_slow_grammar_that_raises_ends_its_own_reply() -> None:
    class Broken(Slow):
        def fill_mask(self, mask: np.ndarray) -> None:
            super().fill_mask(mask)
            if self.num_masks == 4:
                raise ValueError("no token is allowed")

    client = make_client()
    grammar = Broken(blocks_from=99)
    reply = client.submit(make_prompt(5), grammar=grammar, max_tokens=20)
    other = client.submit(make_prompt(5, 1), max_tokens=20)
    client.run()
    assert (reply.finish, reply.error) == ("error", "the grammar failed: no token is allowed")
    assert other.finish == "length"
    check_idle(client)


def test_an_engine_ends_while_a_slow_mask_is_made() -> None:
    client = make_client()
    grammar = Slow(5)
    client.submit(make_prompt(70), grammar=grammar, max_tokens=40)
    block(client, grammar)
    client.loop.scheduler.fail_all(RuntimeError("the engine stops"))
    client.loop.close()
    assert grammar.num_masks == grammar.blocks_from + 1
    grammar.go_on.set()
