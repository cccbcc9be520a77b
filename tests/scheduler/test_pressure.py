"""When bytes are short and steps fail: nobody is killed for another, and nothing is poisoned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from builders import Client, ToyGrammar, check_idle, make_client, make_loop, make_prompt, oracle
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakeBackend, FakePending
from pippin.cache.policy import CheckpointPolicy
from pippin.cache.tree.components import STATE
from pippin.errors import DeviceFailed
from pippin.scheduler.loop import MAX_FAILED_STEPS
from pippin.scheduler.memory import GROWTH_TOKENS
from pippin.types import GRID, Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
layouts = pytest.mark.parametrize("components", [(A,), (A, S), (A, W)], ids=["A", "AS", "AW"])


def run_within(client: Client, capacity: int) -> None:
    """To the end; after each step what is alive must fit."""
    while not client.loop.idle:
        client.step()
        scheduler = client.loop.scheduler
        tree = scheduler.cache.nbytes if scheduler.cache is not None else 0
        assert scheduler.budget.claimed + tree <= capacity
        assert client.backend.memory_used() <= capacity


# ---- bytes ---------------------------------------------------------------------------------------


@both_modes
def test_checkpoints_of_growing_replies_are_within_the_budget(overlap: bool) -> None:
    """A state is as large as 1,500 tokens of KV: eight long replies would leave a hundred."""
    capacity = 8 * FakeBackend(components=(A, S)).row_bytes(10 + 1000) * 3 // 2
    client = make_client(
        overlap=overlap, components=(A, S), num_slots=8, chunk=512, capacity_bytes=capacity
    )
    for number in range(8):
        client.submit(make_prompt(10, number), max_tokens=1000)
    run_within(client, capacity)
    assert {reply.finish for reply in client.replies.values()} == {"length"}
    assert client.loop.scheduler.metrics.preemptions == 0, "checkpoints went before replies"
    check_idle(client)


def test_of_thinned_checkpoints_the_last_are_kept() -> None:
    backend = FakeBackend(components=(A, S))
    capacity = backend.row_bytes(2000) + 6 * backend.spec.state_bytes
    client = Client(make_loop(backend=backend, capacity_bytes=capacity))
    client.submit(make_prompt(10), max_tokens=1500)
    lasts: list[int] = []
    for _ in range(1200):
        client.step()
        (running,) = client.loop.scheduler.running_slots.values()
        assert len(running.checkpoints) <= 6
        lasts.append(max(running.checkpoints, default=0))
    assert lasts == sorted(lasts)
    assert lasts[-1] == 1200 // (2 * GRID) * 2 * GRID
    client.run()
    check_idle(client)


def test_checkpoints_of_replies_evict_no_cached_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [make_prompt(512, 1000 + number) for number in range(10)]

    def restorable(capacity: int, *, with_checkpoints: bool = True) -> tuple[list[int], int]:
        """Of each prefix, once replies have grown; and the bytes of the prefixes."""
        backend = FakeBackend(components=(A, S), num_slots=16, max_len=1 << 14)
        client = make_client(backend=backend, num_slots=8, chunk=512, capacity_bytes=capacity)
        scheduler = client.loop.scheduler
        cache = scheduler.cache
        assert cache is not None
        for prefix in prefixes * 4:
            client.ask([*prefix, 1, 2, 3], max_tokens=1)
        before, nbytes = [cache.probe_prompt(prefix) for prefix in prefixes], cache.nbytes
        with monkeypatch.context() as patch:
            if not with_checkpoints:
                patch.setattr(CheckpointPolicy, "captures_decode", lambda *_: False)
            for number in range(8):
                client.submit(make_prompt(200, number), max_tokens=2000)
            kept = False
            for _ in range(1900):
                client.step()
                kept |= any(running.checkpoints for running in scheduler.running_slots.values())
        after = [cache.probe_prompt(prefix) for prefix in prefixes]
        if capacity == 1 << 40:
            assert kept
            assert after == before
        assert with_checkpoints or not kept
        client.run()
        check_idle(client)
        return after, nbytes

    _, nbytes = restorable(1 << 40)
    # Now with no more room than rows and prefixes need. What was asked last is in the tree too, so
    # rows that grow may evict a state; checkpoints evict none.
    capacity = nbytes + 8 * FakeBackend(components=(A, S), max_len=1 << 14).row_bytes(2300)
    assert restorable(capacity)[0] == restorable(capacity, with_checkpoints=False)[0]


@pytest.mark.parametrize("num_steps", range(1, 6))
@pytest.mark.parametrize("overlap", [True, False])
def test_an_eviction_between_two_chunks_leaves_no_gap(overlap: bool, num_steps: int) -> None:
    """What the tree has of a prompt is locked until the last chunk connects to it."""
    client = make_client(overlap=overlap, components=(A, S), chunk=64)
    client.submit(make_prompt(222), max_tokens=4)
    client.step(num_steps)
    cache = client.loop.scheduler.cache
    assert cache is not None
    (running,) = client.loop.scheduler.running_slots.values()
    computed = running.in_tree == 222
    cache.evict(1 << 40)
    client.run()
    again = client.ask(make_prompt(222), max_tokens=4)
    assert again.cached_tokens == (0 if computed else 222)
    assert cache.stats.gaps == 0
    check_idle(client)


def test_checkpoints_are_given_up_before_a_reply_is_preempted() -> None:
    """However little a checkpoint has left free when the other reply needs more."""
    for left in range(16_000, 160_000, 32_000):
        backend = FakeBackend(components=(A, S), num_slots=4, max_len=1 << 14)
        capacity = backend.row_bytes(2000) + backend.row_bytes(1300) + left
        client = make_client(backend=backend, num_slots=2, chunk=512, capacity_bytes=capacity)
        client.submit(make_prompt(10, 1), max_tokens=1900)
        for _ in range(400):
            client.step()
        (running,) = client.loop.scheduler.running_slots.values()
        assert running.checkpoints
        client.submit(make_prompt(10, 2), max_tokens=1000)
        run_within(client, capacity)
        assert client.loop.scheduler.metrics.preemptions == 0
        check_idle(client)


@both_modes
def test_a_refused_claim_evicts_nothing(overlap: bool) -> None:
    """Room for both rows, but not for what the first one has locked beside them."""
    rows = FakeBackend(components=(A,))
    capacity = rows.row_bytes(2000 + 256) + rows.row_bytes(3000 + 256) + 64 * 1500
    client = make_client(
        overlap=overlap, components=(A,), num_slots=4, chunk=512, capacity_bytes=capacity
    )
    known = [make_prompt(100, 50 + number) for number in range(10)]
    for prompt in known:
        client.ask(prompt, max_tokens=1)
    client.submit(make_prompt(2000, 1), max_tokens=200)
    client.step(2)
    cache = client.loop.scheduler.cache
    assert cache is not None
    before = cache.stats.bytes_evicted
    large = client.submit(make_prompt(5000, 2), max_tokens=200)
    client.step(2)
    assert not client.loop.scheduler.requests[large.id].running
    assert [cache.probe(prompt) for prompt in known] == [100] * 10
    assert cache.stats.bytes_evicted == before


@both_modes
def test_whoever_does_not_fit_is_not_looked_up_again_and_again(overlap: bool) -> None:
    backend = FakeBackend(components=(A,), num_slots=4, restores_by_reference=True)
    capacity = backend.row_bytes(2000 + 256) + backend.row_bytes(3000)
    client = Client(
        make_loop(backend=backend, overlap=overlap, chunk=4096, capacity_bytes=capacity)
    )
    client.submit(make_prompt(2000, 1), max_tokens=200)
    client.step(4)
    cache = client.loop.scheduler.cache
    assert cache is not None
    lookups: list[str] = []
    for name in ("match_prompt", "probe_prompt"):
        real = getattr(cache, name)

        def counted(*args: Any, real: Any = real, name: str = name, **kwargs: Any) -> Any:
            lookups.append(name)
            return real(*args, **kwargs)

        setattr(cache, name, counted)
    client.submit(make_prompt(3000, 2), max_tokens=300)
    client.step(100)
    assert 0 < len(lookups) <= 4
    client.run()
    check_idle(client)


@both_modes
def test_rows_that_read_the_trees_own_payloads_keep_them_in_the_tree(overlap: bool) -> None:
    """Restored by reference, a prefix is counted once, and locked as long as its row runs."""
    backend = FakeBackend(components=(A,), num_slots=4, restores_by_reference=True)
    client = Client(make_loop(backend=backend, overlap=overlap))
    client.ask(make_prompt(300), max_tokens=1)
    reply = client.submit([*make_prompt(300), 5], max_tokens=20)
    client.step(5)
    (running,) = client.loop.scheduler.running_slots.values()
    assert running.nbytes == backend.row_bytes(running.row_tokens, 300)
    assert running.nbytes < backend.row_bytes(running.row_tokens)
    client.loop.flush_cache()
    client.run()
    assert reply.tokens == oracle([*make_prompt(300), 5], components=(A,), max_tokens=20)[0]
    check_idle(client)


# ---- preemption ----------------------------------------------------------------------------------


@both_modes
@layouts
@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_replies_that_outgrow_the_budget_together_all_finish(
    overlap: bool, components: tuple[Component, ...], cache: bool
) -> None:
    """Each fits alone; together they are admitted, and then too long."""
    capacity = 8 * FakeBackend(components=components).row_bytes(10 + 256)
    client = make_client(
        overlap=overlap,
        components=components,
        num_slots=8,
        chunk=512,
        capacity_bytes=capacity,
        cache=cache,
    )
    kwargs = {"max_tokens": 1000, "temperature": 1.0, "min_tokens": 900, "stop_ids": range(3)}
    for number in range(8):
        client.submit(make_prompt(10, number), seed=number, **kwargs)
    run_within(client, capacity)
    for number, reply in enumerate(client.replies.values()):
        expected = oracle(make_prompt(10, number), components=components, seed=number, **kwargs)
        assert (reply.tokens, reply.finish) == expected
    assert client.loop.scheduler.metrics.preemptions > 0
    counted = client.loop.status()["metrics"]
    assert counted["preemptions"] > 0
    check_idle(client)


@both_modes
def test_a_preempted_reply_keeps_its_grammar_and_its_log_probabilities(overlap: bool) -> None:
    capacity = 3 * FakeBackend(components=(A,)).row_bytes(10 + 256)
    client = make_client(
        overlap=overlap, components=(A,), num_slots=4, chunk=512, capacity_bytes=capacity
    )
    for number in range(4):
        client.submit(
            make_prompt(10, number),
            max_tokens=600,
            grammar=ToyGrammar(),
            logprobs=1,
            prompt_logprobs=1,
        )
    client.run()
    assert client.loop.scheduler.metrics.preemptions > 0
    for number, reply in enumerate(client.replies.values()):
        expected = oracle(
            make_prompt(10, number), components=(A,), grammar=ToyGrammar(), max_tokens=600
        )
        assert (reply.tokens, reply.finish) == expected
        assert len(reply.logprobs) == 600
    check_idle(client)


def start_two(capacity_rows: float, *priorities: int) -> tuple[Client, list[str]]:
    """Requests that outgrow the budget together; the ids of those preempted, in order."""
    capacity = int(capacity_rows * FakeBackend(components=(A,)).row_bytes(10 + 256))
    client = make_client(components=(A,), num_slots=4, chunk=512, capacity_bytes=capacity)
    for number, priority in enumerate(priorities):
        client.submit(make_prompt(10, number), max_tokens=500, priority=priority)
    preempted: list[str] = []
    while not client.loop.idle:
        client.step()
        for request in client.loop.scheduler.requests.values():
            if request.num_preemptions and request.id not in preempted:
                preempted.append(request.id)
    return client, preempted


def test_the_youngest_is_preempted_and_the_senior_never_is() -> None:
    client, preempted = start_two(3, 0, 0, 0)
    assert preempted[0] == "r2"
    assert "r0" not in preempted
    assert {reply.finish for reply in client.replies.values()} == {"length"}


def test_low_priority_is_preempted_first() -> None:
    _, preempted = start_two(3, 0, 1, 2)
    assert preempted[0] == "r0"
    assert "r2" not in preempted


def test_whoever_has_the_least_to_run_again_is_preempted_first() -> None:
    """The second request's prompt lies in the tree; the third one's reply is long."""
    capacity = int(4.5 * FakeBackend(components=(A,)).row_bytes(300 + 256))
    client = make_client(components=(A,), num_slots=4, chunk=512, capacity_bytes=capacity)
    client.submit(make_prompt(300, 0), max_tokens=800, id="senior")
    client.step(200)
    client.submit(make_prompt(300, 1), max_tokens=900, id="long")
    client.step(200)
    client.submit(make_prompt(300, 2), max_tokens=900, id="short")
    requests = client.loop.scheduler.requests
    while not any(request.num_preemptions for request in requests.values()):
        client.step()
    assert [r.id for r in requests.values() if r.num_preemptions] == ["short"]
    client.run()
    check_idle(client)


def outgrown() -> Client:
    """Two long replies, of which one has been preempted."""
    capacity = 2 * FakeBackend(components=(A,)).row_bytes(10 + 256)
    client = make_client(components=(A,), cache=False, num_slots=4, capacity_bytes=capacity)
    for number in range(2):
        client.submit(make_prompt(10, number), max_tokens=500, id=f"long{number}")
    while not client.loop.scheduler.metrics.preemptions:
        client.step()
    return client


def test_a_preempted_request_resumes_before_anybody_new_starts() -> None:
    client = outgrown()
    for number in range(3):
        client.submit(make_prompt(250, 9 + number), max_tokens=5, id=f"new{number}")
    requests = client.loop.scheduler.requests
    while not requests["long1"].running:
        client.step()
        assert not any(requests[f"new{number}"].running for number in range(3))
    client.run()
    check_idle(client)


# ---- admission -----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_large", [False, True])
def test_a_later_larger_hit_does_not_hold_up_an_earlier_smaller_request(with_large: bool) -> None:
    """It has hardly anything to compute, but its row does not fit beside what it would lock."""
    rows = FakeBackend(components=(A,))
    capacity = rows.row_bytes(3100)
    client = make_client(components=(A,), num_slots=4, chunk=4096, capacity_bytes=capacity)
    client.ask(make_prompt(1500, 1), max_tokens=1)
    client.submit(make_prompt(400, 2), max_tokens=1500)
    client.step(3)
    small = client.submit(make_prompt(20, 3), max_tokens=1)
    if with_large:
        client.submit([*make_prompt(1500, 1), 1, 2], max_tokens=1)
    client.step(4)
    assert small.finish == "length"
    client.run()


def test_the_queue_is_bounded_in_tokens() -> None:
    client = make_client(num_slots=1, max_queue_tokens=100)
    replies = [client.submit(make_prompt(60, number), max_tokens=1) for number in range(3)]
    client.run()
    assert [reply.finish for reply in replies] == ["length", "error", "error"]
    assert replies[1].error_status == 503
    assert "the queue holds 100" in (replies[1].error or "")
    assert client.ask(make_prompt(200), max_tokens=1).finish == "length", "alone it may be longer"


def test_a_short_prompt_is_not_held_up_by_a_long_one() -> None:
    client = make_client(num_slots=16, chunk=64)
    long = client.submit(make_prompt(6000, 1), max_tokens=2)
    client.step()
    short = client.submit(make_prompt(20, 2), max_tokens=1)
    client.step(4)
    assert short.finish == "length"
    assert not long.tokens
    client.run()


# ---- failure -------------------------------------------------------------------------------------


class Spoiling(FakeBackend):
    """One step fails when it is waited for, and leaves its rows destroyed."""

    bad_step: int | None = None

    def launch(self, plan: StepPlan) -> FakePending:
        pending = super().launch(plan)
        if plan.step == self.bad_step:
            finish = pending.wait

            def fail() -> Any:
                finish()
                for row in plan.rows:
                    self._rows[row.slot].destroy()
                raise RuntimeError("device error")

            pending.wait = fail  # type: ignore[method-assign]
        return pending


def test_what_a_failed_step_left_never_reaches_the_tree() -> None:
    """Step N fails, and N+1 with the next chunk of the same row is in flight already."""
    backend = Spoiling(components=(A, S), num_slots=8)
    client = Client(make_loop(backend=backend, chunk=64, num_slots=4))
    client.ask(make_prompt(300), max_tokens=1)
    cache = client.loop.scheduler.cache
    assert cache is not None
    for node in list(cache.radix.nodes()):
        if node.children and node.end > 64:
            cache.drop(node, STATE)
    prompt = make_prompt(250) + make_prompt(200, 7)
    backend.bad_step = client.loop.scheduler.next_step + 1
    assert client.ask(prompt).finish == "error"
    again = client.ask(prompt)
    assert again.tokens == oracle(prompt, components=(A, S))[0]
    check_idle(client)


@both_modes
def test_what_overflowed_ends_its_own_request_and_never_reaches_the_tree(overlap: bool) -> None:
    class Overflowing(FakeBackend):
        """Slot 1 computes no numbers in its second chunk."""

        def launch(self, plan: StepPlan) -> FakePending:
            pending = super().launch(plan)
            if any(row.slot == 1 and row.start == 64 for row in plan.prefill):
                finish = pending.wait
                pending.wait = lambda: replace(finish(), overflowed=frozenset({1}))  # type: ignore[method-assign]
            return pending

    client = Client(make_loop(backend=Overflowing(num_slots=4), chunk=64, overlap=overlap))
    bad = client.submit(make_prompt(300), max_tokens=5)
    client.step()
    other = client.submit(make_prompt(30, 1), max_tokens=5)
    client.run()
    assert (bad.finish, bad.tokens, bad.error) == ("error", [], "the model's values overflowed")
    assert (other.tokens, other.finish) == oracle(make_prompt(30, 1), max_tokens=5)
    cache = client.loop.scheduler.cache
    assert cache is not None
    assert cache.num_cached(make_prompt(300)) == 64
    check_idle(client)


@both_modes
@pytest.mark.parametrize("broken", ["mask", "advance"])
def test_a_grammar_that_raises_ends_its_own_request(overlap: bool, broken: str) -> None:
    class Broken(ToyGrammar):
        def fill_mask(self, mask: Any) -> None:
            self._checked("mask")
            super().fill_mask(mask)

        def advance(self, tokens: Sequence[int]) -> None:
            self._checked("advance")
            super().advance(tokens)

        def _checked(self, name: str) -> None:
            if name == broken and len(self.calls) > 4:
                raise ValueError("a bug in the grammar")

    client = make_client(overlap=overlap, num_slots=4)
    others = [client.submit(make_prompt(10, number), max_tokens=30) for number in range(3)]
    bad = client.submit(make_prompt(10, 9), max_tokens=30, grammar=Broken())
    client.run()
    assert (bad.finish, bad.error) == ("error", "the grammar failed: a bug in the grammar")
    for number, reply in enumerate(others):
        assert (reply.tokens, reply.finish) == oracle(make_prompt(10, number), max_tokens=30)
    check_idle(client)


@both_modes
def test_a_device_that_always_fails_ends_the_engine_and_tells_everybody(overlap: bool) -> None:
    class Dead(FakeBackend):
        def launch(self, plan: StepPlan) -> FakePending:
            raise RuntimeError("device lost")

    client = Client(make_loop(backend=Dead(num_slots=4), num_slots=2, overlap=overlap))
    replies = [client.submit(make_prompt(5, number)) for number in range(20)]
    client.run()
    failure = client.loop.failure
    assert isinstance(failure, DeviceFailed)
    assert f"{MAX_FAILED_STEPS} steps in a row: device lost" in failure.message
    assert {reply.finish for reply in replies} == {"error"}
    with pytest.raises(DeviceFailed):
        client.submit(make_prompt(5), id="late")


@both_modes
def test_a_device_that_a_backend_calls_lost_ends_the_engine_at_once(overlap: bool) -> None:
    launched: list[int] = []

    class Lost(FakeBackend):
        def launch(self, plan: StepPlan) -> FakePending:
            launched.append(plan.step)
            raise DeviceFailed("the GPU fails: an illegal memory access")

    client = Client(make_loop(backend=Lost(num_slots=4), num_slots=2, overlap=overlap))
    replies = [client.submit(make_prompt(5, number)) for number in range(20)]
    client.run()
    assert len(launched) == 1
    assert str(client.loop.failure) == "the GPU fails: an illegal memory access"
    assert {reply.finish for reply in replies} == {"error"}


def test_failures_that_do_not_follow_each_other_end_nothing() -> None:
    class Shaky(FakeBackend):
        def launch(self, plan: StepPlan) -> FakePending:
            if plan.step % MAX_FAILED_STEPS:
                raise RuntimeError("device lost")
            return super().launch(plan)

    client = Client(make_loop(backend=Shaky(num_slots=4), num_slots=2))
    for number in range(20):
        client.submit(make_prompt(5, number))
    client.run()
    assert client.loop.failure is None
    check_idle(client)


def test_a_chunk_that_finds_no_room_in_the_tree_ends_its_captures() -> None:
    """Those behind it would not connect: they are not captured only to be refused."""
    backend = FakeBackend(components=(A,))
    capacity = backend.row_bytes(1000) + 64 * 200
    client = Client(make_loop(backend=backend, chunk=128, capacity_bytes=capacity))
    client.submit(make_prompt(900), max_tokens=90)
    captured = []
    while not client.loop.idle:
        client.step()
        launched = client.loop._in_flight
        captured += [row.captures for row in launched.plan.prefill] if launched else []
    assert captured[0]
    assert not captured[-1]
    cache = client.loop.scheduler.cache
    assert cache is not None
    assert cache.stats.gaps == 0
    check_idle(client)


def test_a_request_that_is_preempted_again_and_again_claims_more_each_time() -> None:
    """So it is preempted a few times at most, however long its reply is."""
    backend = FakeBackend(components=(A,), num_slots=32, max_len=1 << 14)
    capacity = 2 * backend.row_bytes(100 + 2000)
    client = make_client(backend=backend, num_slots=16, chunk=512, capacity_bytes=capacity)
    requests = []
    for number in range(12):
        client.submit(make_prompt(100, number), max_tokens=2000)
        requests.append(client.loop.scheduler.requests[f"r{number}"])
    while not client.loop.idle:
        client.step()
    doublings = math.log2(2000 / GROWTH_TOKENS)
    assert max(request.num_preemptions for request in requests) <= math.ceil(doublings)
    check_idle(client)
