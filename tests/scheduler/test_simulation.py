"""The device finishes when the test says so: ends, reuse and failures at every possible moment.

The toy device is a queue that moves only when somebody waits for a step or calls `advance`, so a
schedule here is exact: nothing depends on time. Historical bugs of overlap loops are tests by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from builders import (
    Client,
    check_idle,
    make_client,
    make_loop,
    make_prompt,
    oracle,
)
from cases import cases
from pippin.backends.base import StepPlan
from pippin.backends.fake import FakeBackend, FakePending


class HookedBackend(FakeBackend):
    """Calls back before a launch, right after it, and before somebody waits for it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.moments: dict[tuple[str, int], Callable[[], None]] = {}
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> FakePending:
        self.plans.append(plan)
        self._moment("before launch", plan.step)
        pending = super().launch(plan)
        self._moment("after launch", plan.step)
        return pending

    def _moment(self, name: str, step: int) -> None:
        self.moments.pop((name, step), lambda: None)()


@cases("ends", ["abort", "finish"])
@cases("moment", ["before launch", "after launch"])
@cases("device", ["lags", "runs ahead"])
@cases("step", range(9))
def test_an_end_at_any_moment_around_a_launch(
    ends: str, moment: str, device: str, step: int
) -> None:
    """Two chunks, then decode; the slot's next owner and a bystander must not notice."""
    backend = HookedBackend(num_slots=4)
    client = Client(make_loop(backend=backend, num_slots=2, chunk=64))
    client.submit(make_prompt(70, 1), id="ended", max_tokens=5)
    client.submit(make_prompt(70, 2), id="bystander", max_tokens=12)
    client.submit(make_prompt(70, 3), id="next", max_tokens=6)

    def now() -> None:
        getattr(client.loop, ends)("ended")
        if device == "runs ahead":
            backend.device_queue.advance(100)

    backend.moments[moment, step] = now
    client.run()
    replies = client.replies
    expected = oracle(make_prompt(70, 1), max_tokens=5)[0]
    assert replies["ended"].tokens == expected[: len(replies["ended"].tokens)]
    assert replies["bystander"].tokens == oracle(make_prompt(70, 2), max_tokens=12)[0]
    assert replies["next"].tokens == oracle(make_prompt(70, 3), max_tokens=6)[0]
    check_idle(client)


def test_a_slot_is_never_reused_while_a_step_of_its_owner_is_in_flight() -> None:
    """The fence: a slot is freed in a plan made after every step with that row was committed."""
    backend = HookedBackend(num_slots=4)
    client = Client(make_loop(backend=backend, num_slots=2))
    stop = oracle(make_prompt(10, 1), max_tokens=8)[0][3]
    client.submit(make_prompt(10, 1), max_tokens=8, stop_ids=[stop])
    for number in range(2, 8):
        client.submit(make_prompt(10, number), max_tokens=number)
    committed = -1
    while not client.loop.idle:
        before = len(backend.plans)
        client.step()
        for plan in backend.plans[before:]:
            for retire in plan.retire:
                last = max(
                    p.step
                    for p in backend.plans[: plan.step]
                    if retire.slot in {row.slot for row in p.rows}
                )
                assert last <= committed, f"slot {retire.slot} was freed with a step in flight"
        committed = client.loop.scheduler.committed


def test_slot_reuse_straight_after_a_ghost() -> None:
    """One slot: the second owner's first step follows the first owner's ghost on the device."""
    backend = HookedBackend(num_slots=1)
    client = Client(make_loop(backend=backend, num_slots=1, cache=False))
    tokens = oracle(make_prompt(10, 1), max_tokens=8)[0]
    stop = tokens[2]
    first = client.submit(make_prompt(10, 1), max_tokens=8, stop_ids=[stop])
    second = client.submit(make_prompt(10, 2), max_tokens=8)
    client.run()
    assert client.loop.scheduler.metrics.ghost_rows == 1
    ghost, retire, admit = backend.plans[3:6]
    assert [row.slot for row in ghost.decode] == [1]
    assert [row.slot for row in retire.retire] == [1]
    assert [row.slot for row in admit.admit] == [1]
    assert first.tokens == tokens[:3]
    assert second.tokens == oracle(make_prompt(10, 2), max_tokens=8)[0]


def test_a_ghosts_token_is_dropped_and_its_row_completes_the_reply() -> None:
    """The ghost runs the reply's last token, so the tree gets exactly the finished sequence."""
    client = make_client()
    tokens = oracle(make_prompt(100), max_tokens=8)[0]
    reply = client.ask(make_prompt(100), max_tokens=8, stop_ids=[tokens[4]])
    assert reply.tokens == tokens[:5]
    assert client.loop.scheduler.metrics.ghost_rows == 1
    cache = client.loop.scheduler.cache
    assert cache is not None
    assert cache.probe([*make_prompt(100), *reply.tokens]) == 105


def test_no_ghost_where_the_length_is_known() -> None:
    client = make_client()
    client.ask(make_prompt(10), max_tokens=8)
    assert client.loop.scheduler.metrics.ghost_rows == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_two_steps_are_in_flight_through_joins_and_ends_or_one_without_overlap(
    overlap: bool,
) -> None:
    backend = HookedBackend(num_slots=4)
    client = Client(make_loop(backend=backend, num_slots=3, overlap=overlap))
    waiting: list[int] = []
    for number in range(9):
        client.submit(make_prompt(50, number), max_tokens=3 + number % 3)
    for step in range(1, 8):
        backend.moments["after launch", step] = lambda: waiting.append(
            len(client.loop.scheduler.inflight_steps)
        )
    client.run()
    assert waiting == [2 if overlap else 1] * 7


# ---- failures ----------------------------------------------------------------------------------


class FailingBackend(HookedBackend):
    """Its launch, its handing over or its result fails at one step, before or after the work."""

    def __init__(self, fails: str, step: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._fails, self._step = fails, step

    def launch(self, plan: StepPlan) -> FakePending:
        failing = plan.step == self._step
        if failing and self._fails == "launch, nothing done":
            raise RuntimeError("the device is out of memory")
        pending = super().launch(plan)
        if failing and self._fails == "launch, all done":
            pending.discard()
            raise RuntimeError("the device is out of memory")
        if failing and self._fails == "wait":
            pending.wait = self._raise  # type: ignore[method-assign]
        if failing and self._fails == "dispatch":
            pending.dispatch = self._raise  # type: ignore[method-assign]
        return pending

    def _raise(self) -> Any:
        raise RuntimeError("the device is out of memory")


@cases("overlap", [True, False])
@cases("fails", ["launch, nothing done", "launch, all done", "dispatch", "wait"])
@cases("step", range(8))
def test_a_failed_step_fails_its_own_requests_and_nobody_else(
    overlap: bool, fails: str, step: int
) -> None:
    backend = FailingBackend(fails, step, num_slots=4)
    client = Client(make_loop(backend=backend, num_slots=2, chunk=64, overlap=overlap))
    for number in range(6):
        client.submit(make_prompt(40 + number, number), max_tokens=3, id=f"r{number}")
    client.run()
    failed = [reply for reply in client.replies.values() if reply.finish == "error"]
    assert len(failed) <= 2
    assert all("out of memory" in (reply.error or "") for reply in failed)
    for number, reply in enumerate(client.replies.values()):
        expected = oracle(make_prompt(40 + number, number), max_tokens=3)[0]
        assert reply.tokens == (expected[: len(reply.tokens)] if reply in failed else expected)
    after = client.ask(make_prompt(40))
    assert after.tokens == oracle(make_prompt(40))[0]
    check_idle(client)


def test_a_failed_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(make_loop(backend=FailingBackend("wait", 1, num_slots=4)))
    client.ask(make_prompt(10))
    assert "step 1 failed" in caplog.text
    assert "the device is out of memory" in caplog.text


# ---- bugs of overlap loops elsewhere, by name ----------------------------------------------------


def test_copy_on_write_done_twice() -> None:
    """A match is restored once, on its first chunk; later chunks go on from what the row holds."""
    backend = HookedBackend(num_slots=4)
    client = Client(make_loop(backend=backend, chunk=64))
    client.ask(make_prompt(128))
    backend.plans.clear()
    prompt = make_prompt(128) + make_prompt(200, 3)
    reply = client.ask(prompt)
    chunks = [row for plan in backend.plans for row in plan.prefill]
    assert len(chunks) > 2
    assert [row.restore is not None for row in chunks] == [True] + [False] * (len(chunks) - 1)
    assert reply.tokens == oracle(prompt)[0]
    again = client.ask(prompt)
    assert again.tokens == reply.tokens
