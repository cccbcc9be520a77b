"""Several tokens a step: the same tokens as one by one, in fewer steps, and all of them cached."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import pytest

from builders import ALL, Client, ToyGrammar, check_idle, make_loop, make_prompt, oracle
from cases import cases
from oracle_drafter import OracleDrafter
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.policy import MAX_STRIDE
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import (
    BY_DEVICE,
    Candidate,
    DepthPolicy,
    DeviceDrafter,
    Speculation,
)
from pippin.types import Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
Kind = Literal["oracle", "device"]
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
both_kinds = pytest.mark.parametrize("kind", ["oracle", "device"])


class RecordingBackend(FakeBackend):
    """Remembers its plans."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> FakePending:
        self.plans.append(plan)
        return super().launch(plan)

    @property
    def depths(self) -> list[int]:
        return [row.depth for plan in self.plans for row in plan.decode]


def make_client(
    kind: Kind = "oracle",
    *,
    depth: int = 3,
    share: float = 1.0,
    components: tuple[Component, ...] = ALL,
    overlap: bool = True,
    **kwargs: Any,
) -> Client:
    """Its drafts are right at a `share` of places; the oracle knows replies to greedy requests."""
    backend = RecordingBackend(
        components=components, max_depth=depth, draft_share=share, num_slots=64
    )

    @cache
    def reply_to(prompt: tuple[int, ...], temperature: float, seed: int) -> Sequence[int]:
        sampled = {"temperature": temperature, "seed": seed}
        return oracle(prompt, components=components, max_tokens=400, **sampled)[0]

    def reply_of(request: Request) -> Sequence[int]:
        return reply_to(tuple(request.prompt.tolist()), request.params.temperature, request.seed)

    drafter = OracleDrafter(reply_of, share, backend.spec.vocab_size)
    speculation = Speculation(drafter, depth, lambda running: depth)
    if kind == "device":
        speculation = Speculation(
            None, depth, lambda running: depth, device=DeviceDrafter("toy", depth)
        )
    return Client(make_loop(backend=backend, overlap=overlap, speculation=speculation, **kwargs))


def recorded(client: Client) -> RecordingBackend:
    assert isinstance(client.backend, RecordingBackend)
    return client.backend


# ---- the same tokens -----------------------------------------------------------------------------


@both_modes
@both_kinds
@cases("share", [0.0, 0.5, 1.0])
@cases("depth", [1, 4])
@cases("components", [(A,), (A, S), (A, W)], ids=["A", "AS", "AW"])
def test_replies_are_those_without_drafts(
    kind: Kind, overlap: bool, share: float, depth: int, components: tuple[Component, ...]
) -> None:
    client = make_client(kind, depth=depth, share=share, components=components, overlap=overlap)
    for number in range(6):
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
        client.submit(make_prompt(5 + 40 * number, number), max_tokens=30 + number, **sampled)
        client.step()
    client.run()
    for number, reply in enumerate(client.replies.values()):
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
        expected = oracle(reply.prompt, components=components, max_tokens=30 + number, **sampled)
        assert (reply.tokens, reply.finish) == expected
    check_idle(client)
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 0
    if share in (0.0, 1.0):
        assert metrics.accepted_tokens == share * metrics.drafted_tokens


@both_modes
@both_kinds
def test_depths_may_change_at_every_step(kind: Kind, overlap: bool) -> None:
    client = make_client(kind, depth=4, share=0.8, overlap=overlap)
    speculation = client.loop.scheduler.speculation
    assert speculation is not None
    depths = itertools.cycle((0, 3, 1, 4, 4, 0, 0, 2))
    speculation.choose_depth = lambda running: next(depths)
    for number in range(3):
        client.submit(make_prompt(20, number), max_tokens=90)
    client.run()
    for number, reply in enumerate(client.replies.values()):
        assert reply.tokens == oracle(make_prompt(20, number), max_tokens=90)[0]
    assert len(set(recorded(client).depths)) > 2
    check_idle(client)


@both_modes
@both_kinds
def test_right_drafts_save_steps(kind: Kind, overlap: bool) -> None:
    client = make_client(kind, depth=3, overlap=overlap)
    client.ask(make_prompt(10), max_tokens=121)
    with_rows = [plan for plan in recorded(client).plans if plan.decode]
    assert len(with_rows) <= 1 + 120 // 4 + 2


@both_modes
@both_kinds
@cases("max_tokens", [1, 2, 3, 4, 5, 6, 9])
def test_a_reply_ends_at_max_tokens(kind: Kind, overlap: bool, max_tokens: int) -> None:
    client = make_client(kind, overlap=overlap)
    reply = client.ask(make_prompt(10), max_tokens=max_tokens)
    assert (reply.tokens, reply.finish) == oracle(make_prompt(10), max_tokens=max_tokens)
    check_idle(client)


def test_drafts_wait_until_stop_ids_may_be_sampled() -> None:
    client = make_client()
    kwargs: dict[str, Any] = {"max_tokens": 30, "min_tokens": 12, "stop_ids": range(48)}
    reply = client.ask(make_prompt(10), **kwargs)
    assert (reply.tokens, reply.finish) == oracle(make_prompt(10), **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"grammar": ToyGrammar(3)},
        {"speculate": False},
        {"logprobs": 2},
        {"presence_penalty": 0.5},
        {"stop_ids": range(80, 97)},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_what_a_device_cannot_verify_has_no_drafts(kwargs: dict[str, Any]) -> None:
    client = make_client()
    client.ask(make_prompt(10), max_tokens=20, **kwargs)
    assert set(recorded(client).depths) <= {0}


# ---- what is kept --------------------------------------------------------------------------------


@both_modes
@both_kinds
@cases("ends_by", ["stop id", "length", "stop string"])
def test_all_of_a_reply_is_cached_whatever_ended_it(
    kind: Kind, overlap: bool, ends_by: str
) -> None:
    """Drafts that were accepted behind the end are not part of it."""
    prompt = make_prompt(70)
    tokens, _ = oracle(prompt, max_tokens=60)
    client = make_client(kind, overlap=overlap)
    if ends_by == "stop id":
        reply = client.ask(prompt, max_tokens=60, stop_ids=[tokens[17]])
    elif ends_by == "length":
        reply = client.ask(prompt, max_tokens=18)
    else:
        reply = client.submit(prompt, max_tokens=60)
        while len(reply.tokens) < 18:
            client.step()
        client.loop.finish(reply.id)
        client.run()
    turn = [*prompt, *reply.tokens, *make_prompt(9, 5)]
    after = client.ask(turn, max_tokens=20)
    assert after.cached_tokens == len(prompt) + len(reply.tokens)
    assert (after.tokens, after.finish) == oracle(turn, max_tokens=20)
    check_idle(client)


@both_modes
@both_kinds
@cases("share", [0.6, 1.0])
def test_a_branch_inside_a_reply_starts_near_it(kind: Kind, overlap: bool, share: float) -> None:
    """A growing reply leaves recurrent states as often as without drafts, and no more."""
    prompt = make_prompt(10)
    client = make_client(kind, share=share, components=(A, S), overlap=overlap)
    reply = client.submit(prompt, max_tokens=400)
    while client.loop.scheduler.running_slots or not reply.tokens:
        client.step()
    captures = [row for plan in recorded(client).plans for row in plan.decode if row.checkpoint]
    assert len(captures) <= 410 // MAX_STRIDE
    branch = [*prompt, *reply.tokens[:300], 3]
    after = client.ask(branch, max_tokens=10)
    assert (after.cached_tokens or 0) >= 310 - MAX_STRIDE - 4
    assert after.tokens == oracle(branch, components=(A, S), max_tokens=10)[0]


# ---- short of bytes ------------------------------------------------------------------------------


@both_modes
@both_kinds
def test_replies_are_preempted_and_resumed_with_drafts_in_flight(kind: Kind, overlap: bool) -> None:
    backend = FakeBackend(components=(A, S))
    capacity = 3 * backend.row_bytes(10 + 600)
    client = make_client(
        kind,
        share=0.7,
        components=(A, S),
        overlap=overlap,
        num_slots=8,
        chunk=512,
        capacity_bytes=capacity,
    )
    for number in range(8):
        client.submit(make_prompt(10, number), max_tokens=390)
    while not client.loop.idle:
        client.step()
        assert client.backend.memory_used() <= capacity
        for running in client.loop.scheduler.running_slots.values():
            assert running.row_len <= running.row_tokens, "a row is larger than its claim"
    for number, reply in enumerate(client.replies.values()):
        expected = oracle(make_prompt(10, number), components=(A, S), max_tokens=390)
        assert (reply.tokens, reply.finish) == expected
    check_idle(client)


# ---- two drafters --------------------------------------------------------------------------------


def make_client_of_both(share_host: float, share_device: float, policy: DepthPolicy) -> Client:
    """The host knows what it is asked for up to the token 60 of each reply."""
    backend = RecordingBackend(max_depth=4, draft_share=share_device, num_slots=8)

    def reply_of(request: Request) -> Sequence[int]:
        return oracle(request.prompt.tolist(), max_tokens=60)[0]

    drafter = OracleDrafter(reply_of, share_host, backend.spec.vocab_size)
    device = DeviceDrafter("toy", 2)
    speculation = Speculation(drafter, 4, lambda running: 4, policy, device)
    return Client(make_loop(backend=backend, speculation=speculation))


class Always(DepthPolicy):
    """Whatever steps take."""

    def rests(self, rows: int) -> bool:
        return False

    def choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
        return [candidate.depth for candidate in candidates]


def test_a_row_has_the_drafts_that_are_likelier_to_be_accepted() -> None:
    policy = Always()
    client = make_client_of_both(1.0, 0.5, policy)
    prompt = make_prompt(10)
    assert client.ask(prompt, max_tokens=120).tokens == oracle(prompt, max_tokens=120)[0]
    counts = client.loop.scheduler.metrics.drafters
    assert counts["oracle"].accepted == counts["oracle"].drafted > 30
    assert counts["toy"].drafted > 40, "where the host knows nothing"
    assert policy.acceptance.survival("another", BY_DEVICE, 1)[0] < 0.8
    check_idle(client)


def test_a_host_that_is_wrong_leaves_its_rows_to_the_device() -> None:
    client = make_client_of_both(0.0, 1.0, Always())
    for number in range(4):
        prompt = make_prompt(10, number)
        assert client.ask(prompt, max_tokens=60).tokens == oracle(prompt, max_tokens=60)[0]
    counts = client.loop.scheduler.metrics.drafters
    assert counts["toy"].accepted == counts["toy"].drafted > 80
    assert counts["oracle"].drafted < 60
    check_idle(client)


def test_a_reply_begins_as_deep_as_the_last_one_ended() -> None:
    """The device drafts behind its prompt's last token: no step is lost to begin with."""
    policy = Always()
    client = make_client_of_both(1.0, 1.0, policy)
    policy.usual_depth = 2
    client.ask(make_prompt(10), max_tokens=60)
    (prompt,) = [row for plan in recorded(client).plans for row in plan.prefill]
    assert prompt.num_drafts == 2
    check_idle(client)


def test_a_step_with_prompts_begins_no_drafts() -> None:
    """Drafts that the device has left are verified once more; then it leaves none."""
    client = make_client_of_both(1.0, 1.0, Always())
    client.submit(make_prompt(10), max_tokens=60)
    client.step(8)
    client.submit(make_prompt(200, 1), max_tokens=4)
    client.run()
    plans = [plan for plan in recorded(client).plans if plan.decode and plan.num_prefill_tokens]
    assert plans, "a prompt was computed beside the reply"
    assert not any(row.num_drafts or row.proposal for plan in plans for row in plan.decode)
    assert max(recorded(client).depths) > 0
    check_idle(client)


# ---- what is counted -----------------------------------------------------------------------------


@both_kinds
def test_drafts_are_counted_by_drafter_place_and_request(kind: Kind) -> None:
    client = make_client(kind, depth=3, share=0.7)
    replies = [client.submit(make_prompt(10, number), max_tokens=50) for number in range(3)]
    client.run()
    [(name, counts)] = client.loop.scheduler.metrics.drafters.items()
    assert name == {"oracle": "oracle", "device": "toy"}[kind]
    assert counts.drafted == sum(recorded(client).depths)
    assert counts.rows == sum(depth > 0 for depth in recorded(client).depths)
    assert counts.accepted == sum(counts.accepted_at)
    assert counts.accepted_at == sorted(counts.accepted_at, reverse=True)
    assert len(counts.accepted_at) == 3
    assert sum(reply.accepted_drafts for reply in replies) == counts.accepted
    assert 0 < sum(reply.rejected_drafts for reply in replies) <= counts.drafted - counts.accepted


def test_no_drafts_are_looked_for_while_the_policy_rests() -> None:
    """Looking takes the host's time, in every step."""

    class Never(Always):
        num_asked = 0

        def rests(self, rows: int) -> bool:
            self.num_asked += 1
            return True

        def choose(self, rows: int, candidates: Sequence[Candidate]) -> list[int]:
            raise AssertionError("it rests")

    policy = Never()
    client = make_client_of_both(1.0, 1.0, policy)
    client.ask(make_prompt(10), max_tokens=100)
    assert 90 < policy.num_asked < 110, "once a step"


def test_a_request_that_lacks_bytes_does_not_end_drafts() -> None:
    client = make_client_of_both(1.0, 1.0, Always())
    scheduler = client.loop.scheduler
    client.submit(make_prompt(10), max_tokens=300)
    client.step(8)
    scheduler.budget.capacity = scheduler.budget.claimed + scheduler.costs.row_bytes(300)
    waiting = client.submit(make_prompt(500, 1), max_tokens=4)
    client.step(2)  # it is looked up, and refused
    before = len(recorded(client).plans)
    client.step(8)
    assert not waiting.tokens
    assert all(
        row.num_drafts or row.proposal for p in recorded(client).plans[before:] for row in p.decode
    )
