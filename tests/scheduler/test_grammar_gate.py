"""Grammar rows: the forward is launched first, the mask follows, and nobody else waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from builders import Client, ToyGrammar, check_idle, make_loop, make_prompt, oracle
from pippin.backends.base import StepPlan, StepResult
from pippin.backends.fake import FakeBackend, FakePending

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


@both_modes
def test_grammar_rows_and_plain_rows_end_and_join_together(overlap: bool) -> None:
    client, _ = make_recording_client(overlap, num_slots=3)
    kwargs = [
        {"max_tokens": 3 + number, "stop_ids": range(10 * (number % 3))} for number in range(9)
    ]
    for number in range(9):
        grammar = ToyGrammar(4) if number % 2 else None
        client.submit(make_prompt(20, number), grammar=grammar, **kwargs[number])
        client.step()
    client.run()
    for number, reply in enumerate(client.replies.values()):
        grammar = ToyGrammar(4) if number % 2 else None
        expected = oracle(make_prompt(20, number), grammar=grammar, **kwargs[number])
        assert (reply.tokens, reply.finish) == expected
    check_idle(client)


def test_a_ghost_does_not_move_its_grammar() -> None:
    client, events = make_recording_client()
    tokens = oracle(make_prompt(5), grammar=ToyGrammar(), max_tokens=9)[0]
    grammar = ToyGrammar(calls=events)
    reply = client.ask(make_prompt(5), grammar=grammar, max_tokens=9, stop_ids=[tokens[3]])
    assert reply.tokens == tokens[:4]
    assert events.count("advance") == 4
    assert client.loop.scheduler.metrics.ghost_rows == 1


@both_modes
def test_a_grammar_that_raises_fails_its_step_and_not_the_loop(overlap: bool) -> None:
    class Broken(ToyGrammar):
        def fill_mask(self, mask: np.ndarray) -> None:
            raise ValueError("no token is allowed")

    client, _ = make_recording_client(overlap)
    reply = client.ask(make_prompt(5), grammar=Broken())
    assert (reply.finish, reply.error) == ("error", "the grammar failed: no token is allowed")
    assert client.ask(make_prompt(5)).finish == "length"
    check_idle(client)
