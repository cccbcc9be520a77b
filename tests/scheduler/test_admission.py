"""Who starts next: order, ageing and the byte budget."""

from __future__ import annotations

import pytest

from builders import Client, check_idle, make_client, make_prompt, oracle
from pippin.backends.fake import FakeBackend
from pippin.scheduler.admission import (
    MAX_EXAMINED,
    MAX_PASSED_OVER,
    InflightPrefixes,
)
from pippin.scheduler.prompts import MAX_SKIPPED
from pippin.scheduler.request import Request
from pippin.types import Component

A, S = Component.ATTENTION, Component.STATE
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


def bytes_for(*lengths: int, components: tuple[Component, ...] = (A,)) -> int:
    backend = FakeBackend(components=components)
    return sum(backend.row_bytes(length) for length in lengths)


def order_of_start(client: Client) -> list[str]:
    """Ids in the order in which requests were given a slot."""
    started: list[str] = []
    while not client.loop.idle:
        client.step()
        for running in client.loop.scheduler.running_slots.values():
            if running.request.id not in started:
                started.append(running.request.id)
    return started


def test_requests_without_a_match_start_in_order_of_arrival() -> None:
    client = make_client(num_slots=1)
    for number in range(6):
        client.submit(make_prompt(20, number), id=str(number))
    assert order_of_start(client) == list("012345")


def test_whoever_has_the_least_to_compute_starts_first() -> None:
    client = make_client(num_slots=1)
    client.ask(make_prompt(200))
    client.submit(make_prompt(10, 5), id="busy", max_tokens=3)
    client.step()
    client.submit(make_prompt(90, 6), id="cold")
    client.submit(make_prompt(140), id="some")
    client.submit(make_prompt(200), id="most")
    assert order_of_start(client) == ["busy", "most", "some", "cold"]


@both_modes
def test_nobody_is_passed_over_more_often_than_the_limit(overlap: bool) -> None:
    """A stream of perfect hits arrives without end; the cold ones still get their turn."""
    client = make_client(overlap=overlap, num_slots=1)
    client.ask(make_prompt(200))
    requests = client.loop.scheduler.requests
    for number in range(3):
        client.submit(make_prompt(20, 5 + number), id=f"cold{number}", max_tokens=1)
    cold = [requests[f"cold{number}"] for number in range(3)]
    hits = 0
    while any(request.finish is None for request in cold):
        if len(client.loop.scheduler.admission.queue) < 6:
            client.submit(make_prompt(200), id=f"hit{hits}", max_tokens=1)
            hits += 1
        client.step()
        assert hits < 100, "the cold requests starve"
    assert max(request.passed_over for request in cold) == MAX_PASSED_OVER
    client.run()


@both_modes
def test_a_reply_that_outgrows_the_whole_budget_fails_with_both_numbers(overlap: bool) -> None:
    capacity = bytes_for(300)
    client = make_client(overlap=overlap, components=(A,), num_slots=2, capacity_bytes=capacity)
    large = client.submit(make_prompt(10, 1), max_tokens=400)
    fits = client.submit(make_prompt(10, 2), max_tokens=280)
    client.run()
    assert (large.finish, fits.finish) == ("error", "length")
    assert fits.tokens == oracle(make_prompt(10, 2), components=(A,), max_tokens=280)[0]
    assert large.error_status == 503
    assert f"{capacity:,}" in (large.error or "")
    assert f"{bytes_for(301):,}" in (large.error or "")
    check_idle(client)


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    capacity = bytes_for(100)
    client = make_client(components=(A,), capacity_bytes=capacity)
    reply = client.submit(make_prompt(300))
    other = client.submit(make_prompt(20), max_tokens=4)
    client.run()
    assert (reply.finish, other.finish) == ("error", "length")
    assert f"{bytes_for(301):,}" in (reply.error or "")
    assert f"{capacity:,}" in (reply.error or "")


@both_modes
def test_a_request_with_no_head_room_still_starts_when_it_is_alone(overlap: bool) -> None:
    client = make_client(overlap=overlap, components=(A,), chunk=512, capacity_bytes=bytes_for(120))
    reply = client.ask(make_prompt(100), max_tokens=300)
    assert reply.finish == "error"  # it outgrows the budget in the end
    assert len(reply.tokens) > 20
    check_idle(client)


@both_modes
def test_a_match_too_large_to_keep_beside_its_own_row_is_given_up(overlap: bool) -> None:
    capacity = bytes_for(300)
    client = make_client(overlap=overlap, components=(A,), chunk=512, capacity_bytes=capacity)
    client.ask(make_prompt(200), max_tokens=1)
    reply = client.ask(make_prompt(200) + make_prompt(60, 1), max_tokens=2)
    assert reply.finish == "length"
    assert reply.cached_tokens == 0
    check_idle(client)


@both_modes
def test_a_row_that_must_grow_lets_go_of_what_it_holds_in_the_tree(overlap: bool) -> None:
    """Alone, it fits; beside its own prompt in the tree it does not."""
    capacity = bytes_for(600)
    client = make_client(overlap=overlap, components=(A,), chunk=512, capacity_bytes=capacity)
    reply = client.ask(make_prompt(100), max_tokens=500)
    assert (reply.tokens, reply.finish) == oracle(make_prompt(100), components=(A,), max_tokens=500)
    check_idle(client)


@pytest.mark.parametrize("num_branches", [15, 16, 40, 120])
def test_a_stranger_starts_at_once_behind_branches_of_a_long_prompt(num_branches: int) -> None:
    """Those that wait by choice for a prefix are not looked at in place of others."""
    client = make_client(components=(A, S), num_slots=140, chunk=512, max_len=1 << 15)
    long = make_prompt(16_000, 1)
    client.submit(long, max_tokens=2)
    client.step()
    branches = [client.submit([*long, i], max_tokens=2) for i in range(num_branches)]
    stranger = client.submit(make_prompt(20, 99), max_tokens=2)
    client.step(7)  # the prompt takes more than 30; how many tokens a step has is up to its pace
    assert stranger.tokens
    client.run()
    assert all(reply.cached_tokens >= 15_900 for reply in branches)
    check_idle(client)


def test_a_plan_looks_at_a_bounded_number_of_a_thousand_that_wait() -> None:
    client = make_client(components=(A, S), num_slots=4, chunk=64, max_len=1 << 15)
    long = make_prompt(4_000, 1)
    client.submit(long, max_tokens=2)
    client.step()
    admission = client.loop.scheduler.admission
    examined: list[str] = []
    set_aside = admission._set_aside

    def counted(request: Request, inflight: InflightPrefixes) -> bool:
        examined.append(request.id)
        return set_aside(request, inflight)

    admission._set_aside = counted  # type: ignore[method-assign]
    for i in range(1000):
        client.submit([*long, i], max_tokens=1)
    for _ in range(20):
        before = len(examined)
        client.step()
        assert len(examined) - before <= MAX_EXAMINED
    assert len(set(examined)) == len(examined) == 1000, "each was looked at once"
    assert admission.num_aside == 1000


def test_a_branch_goes_on_when_what_it_waits_for_is_gone() -> None:
    client = make_client(components=(A, S), num_slots=8, chunk=64, max_len=1 << 15)
    long = make_prompt(2_000, 1)
    first = client.submit(long, max_tokens=2)
    client.step()
    branches = [client.submit([*long, i], max_tokens=2) for i in range(3)]
    client.step(2)
    assert client.loop.scheduler.admission.num_aside == 3
    client.loop.abort(branches[1].id)
    client.loop.abort(first.id)
    client.run()
    assert [reply.finish for reply in branches] == ["length", "abort", "length"]
    check_idle(client)


@both_modes
@pytest.mark.parametrize("prompt_logprobs", [None, 1])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("length", [100, 127, 192, 200])
def test_a_request_waits_for_what_will_be_in_the_tree_and_no_longer(
    overlap: bool, prompt_logprobs: int | None, deterministic: bool, length: int
) -> None:
    """The first one ends long after its prompt was computed, of which the tree may get nothing."""
    client = make_client(overlap=overlap, chunk=256, deterministic=deterministic)
    prompt = make_prompt(length)
    first = client.submit(prompt, max_tokens=400, prompt_logprobs=prompt_logprobs)
    others = [client.submit(prompt, max_tokens=4, seed=seed) for seed in range(2)]
    client.step(3)
    others.append(client.submit([*prompt[:90], *make_prompt(40, 1)], max_tokens=4))
    while not all(reply.finish for reply in others):
        client.step()
        assert len(first.tokens) < 20
    for reply in others:
        assert reply.tokens == oracle(reply.prompt, max_tokens=4)[0]
    assert prompt_logprobs or all(reply.cached_tokens for reply in others[:2])
    client.run()
    check_idle(client)


@both_modes
@pytest.mark.parametrize("deterministic", [True, False])
def test_nobody_waits_for_a_state_that_had_no_room(overlap: bool, deterministic: bool) -> None:
    backend = FakeBackend(components=(S,), knows_head=False)
    client = make_client(backend=backend, overlap=overlap, deterministic=deterministic)
    budget = client.loop.scheduler.budget
    enough, budget.capacity = budget.capacity, backend.row_bytes(500)
    first = client.submit(make_prompt(128), max_tokens=200)
    client.step()
    budget.capacity = enough
    second = client.submit(make_prompt(128), max_tokens=4)
    while not second.finish:
        client.step()
        assert len(first.tokens) < 20
    client.run()
    check_idle(client)


def test_a_prefill_inherits_the_priority_of_a_request_that_waits_for_it() -> None:
    """Else that request would wait for as long as others of its own priority arrive."""
    client = make_client(num_slots=8, chunk=64, max_len=1 << 15)
    long = make_prompt(2_000, 1)
    first = client.submit(long, max_tokens=2, priority=-1)
    client.step()
    other = client.submit(make_prompt(3_000, 2), max_tokens=2)
    client.step(2)
    urgent = client.submit([*long, 7], max_tokens=2, priority=5)
    client.step()
    (running,) = (
        h for h in client.loop.scheduler.running_slots.values() if h.request.id == first.id
    )
    assert running.priority == 5
    while not urgent.tokens:
        client.step()
    assert first.tokens
    assert not other.tokens
    assert running.priority == -1, "nothing waits for it any more"
    client.run()


def test_a_prefill_that_nothing_waits_for_any_more_has_its_own_priority() -> None:
    client = make_client(num_slots=8, chunk=64, max_len=1 << 15)
    long = make_prompt(2_000, 1)
    client.submit(long, max_tokens=2, priority=-1)
    client.step()
    waiting = [client.submit([*long, 7], max_tokens=2, priority=p) for p in (5, 3)]
    client.step()
    (running,) = client.loop.scheduler.running_slots.values()
    priorities = [running.priority]
    for reply in waiting:
        client.loop.abort(reply.id)
        client.step()
        priorities.append(running.priority)
    assert priorities == [5, 3, -1]


def test_prompts_of_a_higher_priority_are_computed_first_but_not_for_ever() -> None:
    """Before one in the queue that started, and a started one of a lower priority still gets a
    chunk now and then."""
    client = make_client(num_slots=8, chunk=64, max_len=1 << 15)
    low = client.submit(make_prompt(1_000, 1), max_tokens=1, priority=-1)
    client.step(2)
    high = client.submit(make_prompt(4_000, 2), max_tokens=1)
    client.step(2)
    (one, two) = client.loop.scheduler.running_slots.values()
    held = one.row_len
    client.step(4)
    assert one.row_len == held
    assert two.row_len > 4 * 64
    client.step(2 * MAX_SKIPPED)
    assert one.row_len > held
    while not high.tokens:
        client.step()
    assert not low.tokens
    client.run()
    check_idle(client)
