"""Tokens that a grammar forces: known before they are drawn, and run several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from builders import (
    Client,
    ToyGrammar,
    check_idle,
    make_client,
    make_loop,
    make_prompt,
    oracle,
)
from cases import cases
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakeBackend, FakePending
from pippin.scheduler.pace import Pace, Timed
from pippin.types import GRID, Component

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
A = Component.ATTENTION


class RecordingBackend(FakeBackend):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(num_slots=8, **kwargs)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> FakePending:
        self.plans.append(plan)
        return super().launch(plan)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Where chunks of replies began and ended."""
        return [(r.start, r.end) for p in self.plans for r in p.prefill if r.start and r.masked]


def check(client: Client, **kwargs: Any) -> None:
    for number, reply in enumerate(client.replies.values()):
        grammar = ToyGrammar(3, run=kwargs.get("run", 9), length=kwargs.get("length"))
        asked = {k: v for k, v in kwargs.items() if k not in ("run", "length")}
        expected = oracle(make_prompt(20, number), grammar=grammar, **asked)
        assert (reply.tokens, reply.finish) == expected


@both_modes
def test_a_run_of_forced_tokens_takes_two_steps(overlap: bool) -> None:
    backend = RecordingBackend()
    client = Client(make_loop(backend=backend, overlap=overlap))
    client.ask(make_prompt(20), grammar=ToyGrammar(3, run=9), max_tokens=40)
    check(client, max_tokens=40)
    assert len(backend.plans) < 25
    assert [end - start for start, end in backend.chunks][:2] == ([9, 9] if overlap else [10, 10])
    check_idle(client)


@both_modes
def test_a_client_has_forced_tokens_with_the_one_before_them(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    reply = client.submit(make_prompt(20), grammar=ToyGrammar(3, run=9), max_tokens=40)
    lengths = set()
    while reply.finish is None:
        client.step()
        lengths.add(len(reply.tokens))
    assert lengths - {0} == {1, 2, 12, 13, 14, 24, 25, 26, 36, 37, 38, 40}


@both_modes
@cases("chunks", [True, False], ids=["at once", "one by one"])
@cases(
    "asked",
    [
        {"max_tokens": 40},
        {"max_tokens": 7},  # ends in the middle of a run
        {"max_tokens": 60, "temperature": 1.0, "seed": 4},
        {"max_tokens": 60, "min_tokens": 30, "stop_ids": [11, 12, 13, 14, 15]},
        {"max_tokens": 60, "length": 8},  # the grammar ends there
        {"max_tokens": 60, "run": 1},
        {"max_tokens": 200, "run": 70},  # over the places of checkpoints
    ],
    ids=str,
)
def test_what_is_said_does_not_depend_on_how_it_is_run(
    overlap: bool, chunks: bool, asked: dict[str, Any]
) -> None:
    client = make_client(overlap=overlap, forced_chunks=chunks)
    for number in range(4):
        grammar = ToyGrammar(3, run=asked.get("run", 9), length=asked.get("length"))
        kwargs = {k: v for k, v in asked.items() if k not in ("run", "length")}
        client.submit(make_prompt(20, number), grammar=grammar, **kwargs)
    client.run()
    check(client, **asked)
    check_idle(client)


@both_modes
def test_log_probabilities_of_forced_tokens_are_those_of_their_places(overlap: bool) -> None:
    """They are drawn like others, so the tokens are the same; and there is one score for each."""
    client = make_client(overlap=overlap)
    client.ask(make_prompt(20), grammar=ToyGrammar(3, run=9), max_tokens=40, logprobs=1)
    check(client, max_tokens=40)
    assert len(client.replies["r0"].logprobs) == 40


@both_modes
def test_chunks_stop_short_of_checkpoints_which_are_captured_all_the_same(overlap: bool) -> None:
    captured = []
    for chunks in (True, False):
        backend = RecordingBackend()
        client = Client(make_loop(backend=backend, overlap=overlap, forced_chunks=chunks))
        client.ask(make_prompt(20), grammar=ToyGrammar(3, run=200), max_tokens=250)
        check(client, run=200, max_tokens=250)
        captured.append([r.end for plan in backend.plans for r in plan.decode if r.checkpoint])
        assert bool(backend.chunks) == chunks
    assert captured[0] == captured[1]
    assert 2 * GRID in captured[0]


@both_modes
@pytest.mark.parametrize("ends", ["length", "max_tokens"])
def test_a_reply_that_ends_in_forced_tokens_is_in_the_tree_whole(overlap: bool, ends: str) -> None:
    client = make_client(overlap=overlap)
    grammar = ToyGrammar(3, run=30, length=20 if ends == "length" else None)
    max_tokens = 20 if ends == "max_tokens" else 99
    reply = client.ask(make_prompt(20), grammar=grammar, max_tokens=max_tokens)
    assert (len(reply.tokens), reply.finish) == (20, "stop" if ends == "length" else "length")
    follow_up = [*make_prompt(20), *reply.tokens, 5]
    assert client.ask(follow_up).cached_tokens == 40
    assert client.replies["r1"].tokens == oracle(follow_up)[0]
    check_idle(client)


@both_modes
def test_a_preempted_reply_goes_on_behind_what_was_forced(overlap: bool) -> None:
    capacity = 3 * FakeBackend(components=(A,)).row_bytes(10 + 256)
    client = make_client(
        overlap=overlap, components=(A,), num_slots=4, chunk=512, capacity_bytes=capacity
    )
    for number in range(4):
        client.submit(make_prompt(20, number), max_tokens=600, grammar=ToyGrammar(3, run=9))
    client.run()
    assert client.loop.scheduler.metrics.preemptions > 0
    check(client, max_tokens=600, components=(A,))
    check_idle(client)


@both_modes
def test_a_row_without_bytes_for_a_chunk_takes_tokens_one_by_one(overlap: bool) -> None:
    """Alone, with bytes for exactly its own end: a chunk beyond them may not be waited for."""
    backend = FakeBackend(components=(A,), num_slots=4)
    capacity = backend.row_bytes(20 + 60)
    loop = make_loop(backend=backend, overlap=overlap, cache=False, capacity_bytes=capacity)
    client = Client(loop)
    client.ask(make_prompt(20), max_tokens=60, grammar=ToyGrammar(3, run=50))
    check(client, max_tokens=60, run=50, components=(A,))


def test_deterministic_replies_run_token_by_token() -> None:
    backend = RecordingBackend()
    client = Client(make_loop(backend=backend, deterministic=True))
    client.ask(make_prompt(20), grammar=ToyGrammar(3, run=9), max_tokens=40)
    check(client, max_tokens=40)
    assert not backend.chunks


@pytest.mark.parametrize(
    ("lengths", "num_streams", "pays"),
    [((12,), 1, True), ((2,), 1, False), ((12,), 16, False), ((40,) * 8, 8, True)],
)
def test_a_chunk_pays_if_it_saves_more_time_than_everybody_waits(
    lengths: Sequence[int], num_streams: int, pays: bool
) -> None:
    """Steps of 4 ms, and forwards of 10 ms with 0.2 ms a token."""
    pace = Pace(512)
    assert not pace.pays_off(lengths, num_streams), "nothing is known of this machine yet"
    for tokens in (0, 16, 64, 0, 256, 0):
        for rows in (0, 1, 16):
            if rows or tokens:
                seconds = 0.004 * bool(rows) + (0.01 + 0.0002 * tokens) * bool(tokens)
                pace.costs.observe(Timed(seconds, rows, tokens))
    assert pace.pays_off(lengths, num_streams) is pays
