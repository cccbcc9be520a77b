"""A prompt that the tree holds as a whole: its first token takes no forward, and no waiting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import (
    ALL,
    Client,
    FixedPace,
    ToyGrammar,
    check_idle,
    make_client,
    make_loop,
    make_prompt,
    oracle,
)
from cases import cases
from pippin.backends.base import PrefillRow, StepPlan
from pippin.backends.fake import FakeBackend, FakePending
from pippin.types import GRID, Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = [ALL, (A,), (A, S), (A, W), (S,), (W, S), (W,)]
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
every_layout = pytest.mark.parametrize("components", LAYOUTS)
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 4, "min_tokens": 3, "stop_ids": range(40)},
]


def num_run(client: Client) -> int:
    """Prompt tokens that went through the model."""
    return client.backend.device_queue.tokens_run


@both_modes
@every_layout
@cases("length", [1, 20, GRID, 200])
def test_the_same_prompt_again_computes_nothing(
    overlap: bool, components: tuple[Component, ...], length: int
) -> None:
    client = make_client(overlap=overlap, components=components)
    prompt = make_prompt(length)
    client.ask(prompt, max_tokens=30)
    before = num_run(client)
    for params in SAMPLING:
        reply = client.ask(prompt, max_tokens=12, **params)
        assert (reply.tokens, reply.finish) == oracle(
            prompt, components=components, max_tokens=12, **params
        )
        assert reply.cached_tokens == length
    assert num_run(client) == before
    check_idle(client)
    cache = client.loop.scheduler.cache
    assert cache is not None
    assert cache.stats.whole_hits == len(SAMPLING)


@both_modes
def test_a_prompt_that_ends_inside_another_is_computed_once_more_and_then_never(
    overlap: bool,
) -> None:
    client = make_client(overlap=overlap, components=(A,))
    client.ask(make_prompt(200))
    cached = [client.ask(make_prompt(120)).cached_tokens for _ in range(3)]
    assert cached == [119, 120, 120]
    check_idle(client)


@both_modes
def test_a_grammar_masks_the_first_token(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    client.ask(make_prompt(70))
    reply = client.ask(make_prompt(70), grammar=ToyGrammar(5), max_tokens=20)
    assert reply.cached_tokens == 70
    assert reply.tokens == oracle(make_prompt(70), grammar=ToyGrammar(5), max_tokens=20)[0]


def test_scores_of_a_prompt_take_its_forward() -> None:
    client = make_client()
    client.ask(make_prompt(70))
    reply = client.ask(make_prompt(70), prompt_logprobs=1)
    assert reply.cached_tokens == 0
    assert len(reply.prompt_logprobs) == 69


def test_deterministic_engines_know_whole_blocks_alone() -> None:
    client = make_client(deterministic=True)
    for length, cached in ((2 * GRID, 2 * GRID), (2 * GRID + 1, 2 * GRID)):
        client.ask(make_prompt(length, length))
        assert client.ask(make_prompt(length, length)).cached_tokens == cached


@both_modes
@pytest.mark.parametrize("length", [30, 100, 300])
def test_the_same_prompt_many_times_at_once_is_computed_once(overlap: bool, length: int) -> None:
    client = make_client(overlap=overlap, num_slots=8)
    replies = [client.submit(make_prompt(length), temperature=1.0, seed=n) for n in range(6)]
    client.run()
    assert num_run(client) == length
    for seed, reply in enumerate(replies):
        assert reply.tokens == oracle(make_prompt(length), temperature=1.0, seed=seed)[0]
    check_idle(client)


class Resting(FixedPace):
    """Streams have every step to themselves."""

    def budget(self, num_streams: int, num_prompts: int = 1, num_drafts: int = 0) -> int:
        return 0 if num_streams else self.prefill_tokens


@both_modes
def test_it_starts_in_a_step_that_has_no_room_for_prompts(overlap: bool) -> None:
    client = make_client(overlap=overlap, num_slots=8)
    client.ask(make_prompt(70))
    client.submit(make_prompt(20, 1), max_tokens=100)
    client.step(3)
    client.loop.scheduler.pace = Resting(128)
    longer = client.submit(make_prompt(90, 2))
    hit = client.submit(make_prompt(70))
    client.step(2)
    assert hit.tokens
    assert not longer.tokens
    client.run()
    assert hit.tokens == oracle(make_prompt(70))[0]
    check_idle(client)


class CountingBackend(FakeBackend):
    num_launched = 0

    def launch(self, plan: StepPlan) -> FakePending:
        self.num_launched += 1
        return super().launch(plan)


def test_its_token_is_told_before_the_next_step_is_launched() -> None:
    backend = CountingBackend()
    client = Client(make_loop(backend=backend))
    client.ask(make_prompt(70))
    before = backend.num_launched
    hit = client.submit(make_prompt(70))
    while not hit.tokens:
        client.step()
    assert backend.num_launched == before + 1
    client.run()
    assert hit.tokens == oracle(make_prompt(70))[0]


def test_without_room_for_its_state_a_prompts_end_is_no_checkpoint() -> None:
    client = make_client(components=(A, S))
    cache = client.loop.scheduler.cache
    assert cache is not None
    client.ask(make_prompt(70))
    ends = [n for n in cache.radix.nodes() if n.end == 70]
    for node in ends:
        cache.drop(node, 2)
    assert client.ask(make_prompt(70)).cached_tokens == GRID
    assert client.ask(make_prompt(70)).cached_tokens == 70
    check_idle(client)


def test_a_plan_is_told_the_bytes_of_hidden_vectors_that_it_captures() -> None:
    backend = FakeBackend()
    prompt = np.array(make_prompt(70), np.int32)
    told = [
        backend.transient_bytes(
            StepPlan(0, prefill=(PrefillRow(1, 0, prompt, samples=samples, captures=True),))
        )
        for samples in (True, False)
    ]
    assert told[0] - told[1] == backend.spec.hidden_bytes > 0
