"""Prompts that another engine computes: whole, in part, late, damaged, or not at all."""

from __future__ import annotations

import pytest

from builders import ToyGrammar, check_idle, make_prompt, oracle
from peers import Pair
from pippin.backends.base import PendingStep, StepPlan
from pippin.backends.fake import FakeBackend
from pippin.types import Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
LAYOUTS = [(A,), (A, S), (A, W), (A, W, S), (S,), (W, S)]
IDS = ["-".join(c.value for c in layout) for layout in LAYOUTS]


def check_ended(pair: Pair) -> None:
    for client in (pair.prefill, pair.decode):
        check_idle(client)
    store = pair.wire.store
    assert store is not None
    for _ in range(20):  # what was loaded is forgotten, a little in each plan
        assert pair.decode.loop.scheduler.plan() is None
        pair.wire.workers.advance(99)
    assert not pair.decode.loop.scheduler.tiers[-1][0]._owned, "it is named still"
    assert not store.entries(), "what was loaded is kept"
    assert not any(area.num_readers for area in store._areas)


@pytest.mark.parametrize("components", LAYOUTS, ids=IDS)
def test_a_prompt_that_another_engine_computed_is_decoded_without_a_forward(
    components: tuple[Component, ...],
) -> None:
    pair, prompt = Pair(components=components), make_prompt(500)
    reply = pair.ask(prompt, max_tokens=40)
    assert reply.tokens == oracle(prompt, components=components, max_tokens=40)[0]
    assert (reply.cached_tokens, reply.peer_tokens) == (500, 500)
    assert pair.decode.loop.counters()["metrics"]["computed_tokens"] == 0
    assert pair.decode.loop.counters()["metrics"]["peer_tokens"] == 500
    assert (pair.handovers["asked"], pair.handovers["arrived"]) == (1, 1)
    assert (pair.pushes["asked"], pair.pushes["sent"]) == (1, 1)
    ends = [end.loop.scheduler.traffic for end in (pair.decode, pair.prefill)]  # as the page shows
    assert [(end.num_received, end.num_sent) for end in ends] == [(1, None), (None, 1)]
    check_ended(pair)


@pytest.mark.parametrize("deterministic", [False, True])
def test_seeds_grammars_and_salts_mean_the_same(deterministic: bool) -> None:
    pair, prompt = Pair(deterministic=deterministic), make_prompt(1_100)
    sampled = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
    first = pair.decode.submit(prompt, salt=b"one", **sampled)
    second = pair.decode.submit(prompt, salt=b"two", grammar=ToyGrammar(), max_tokens=20)
    pair.run()
    assert first.tokens == oracle(prompt, **sampled)[0]
    assert second.tokens == oracle(prompt, grammar=ToyGrammar(), max_tokens=20)[0]
    least = 1_024 if deterministic else 1_100  # a state on the grid; one of the prompt's end
    assert (first.peer_tokens, second.peer_tokens) == (least, least)
    check_ended(pair)


def test_without_a_hidden_vector_a_prompt_is_restored_before_its_end() -> None:
    pair, prompt = Pair(knows_head=False), make_prompt(500)
    reply = pair.ask(prompt)
    assert (reply.tokens, reply.peer_tokens) == (oracle(prompt)[0], 448)
    check_ended(pair)


def test_what_the_decode_engine_has_is_not_sent() -> None:
    pair, prompt = Pair(), make_prompt(500)
    first = pair.ask(prompt, max_tokens=8)
    num_before = len(pair.wire.sent)
    turn = [*prompt, *first.tokens, *make_prompt(300, 9)]
    again = pair.ask(turn)
    assert again.tokens == oracle(turn)[0]
    assert (again.cached_tokens, again.peer_tokens) == (808, 300)
    runs = [entry for _, entry in pair.wire.sent[num_before:] if entry.key.component is A]
    assert (runs[0].start, runs[-1].end) == (508, 808)
    check_ended(pair)


def test_chunks_are_sent_while_later_ones_are_computed() -> None:
    pair, prompt = Pair(), make_prompt(640)
    pair.decode.submit(prompt)
    while not pair.wire.sent:
        pair.step()
    assert pair.prefill.loop.counters()["metrics"]["computed_tokens"] <= 320
    pair.run()
    runs = [entry for _, entry in pair.wire.sent if entry.key.component is A]
    assert len(runs) >= 4
    assert [entry.start for entry in runs[1:]] == [entry.end for entry in runs[:-1]]
    check_ended(pair)


def test_a_chunk_is_sent_before_the_next_one_is_computed() -> None:
    pair = Pair(overlap=False, components=(A,))
    pair.decode.submit(make_prompt(640))
    known: dict[int, int] = {}  # tokens computed, and how far the KV had been sent then
    while not pair.decode.loop.idle:
        pair.step()
        entries = [entry for _, entry in pair.wire.sent if entry.key.component is A]
        computed = pair.prefill.loop.counters()["metrics"]["computed_tokens"]
        known[computed] = max((entry.end for entry in entries), default=0)
    assert {computed: sent for computed, sent in known.items() if computed} == {
        computed: computed for computed in range(64, 641, 64)
    }
    check_ended(pair)


def test_a_prompt_that_is_computed_alone_is_sent_in_parts() -> None:
    pair, prompt = Pair(components=(A,), chunk=512), make_prompt(2_048)
    pair.prefill.loop.scheduler.pace.part_tokens = lambda prompt_len: prompt_len // 16  # type: ignore[method-assign]
    plans = planned_tokens(pair)
    pair.ask(prompt)
    assert [num for num in plans if num] == [128] * 16
    plans.clear()
    pair.prefill.submit(make_prompt(2_000, 8))
    pair.prefill.submit(make_prompt(2_000, 9))
    pair.ask(make_prompt(2_048, 5))
    assert max(plans) == 512
    check_ended(pair)


def planned_tokens(pair: Pair) -> list[int]:
    """Of prompts, in each step of the prefill engine from now on."""
    backend, found = pair.prefill.loop.backend, []
    launch = backend.launch

    def noted(plan: StepPlan) -> PendingStep:
        found.append(plan.num_prefill_tokens)
        return launch(plan)

    backend.launch = noted  # type: ignore[method-assign]
    return found


def test_few_states_inside_of_a_long_prompt_are_sent() -> None:
    pair, prompt = Pair(chunk=1_024, max_len=40_960), make_prompt(20_500)
    reply = pair.ask(prompt, max_tokens=8)
    assert (reply.tokens, reply.peer_tokens) == (oracle(prompt, max_tokens=8)[0], 20_500)
    states = [entry.end for _, entry in pair.wire.sent if entry.key.component is S]
    assert states == [*range(2_048, 20_481, 3_072), 20_500]
    check_ended(pair)


def test_what_the_prefill_engine_has_in_memory_is_sent_without_computing_it() -> None:
    pair, prompt = Pair(), make_prompt(500)
    pair.prefill.ask([*prompt, *make_prompt(100, 3)])
    pair.prefill.ask(prompt)
    computed = pair.prefill.loop.counters()["metrics"]["computed_tokens"]
    reply = pair.ask(prompt)
    assert (reply.tokens, reply.peer_tokens) == (oracle(prompt)[0], 500)
    assert pair.prefill.loop.counters()["metrics"]["computed_tokens"] == computed
    check_ended(pair)


def test_a_prompt_that_is_late_is_computed_and_not_wanted_any_more() -> None:
    pair, prompt = Pair(), make_prompt(500)
    reply = pair.decode.submit(prompt)
    pair.decode.step(3)
    assert pair.decode.loop.scheduler.requests[reply.id].phase == "loading"
    assert pair.decode.loop.counters()["waiting"] == 1
    pair.now = 1e6
    for _ in range(30):
        pair.decode.step()
    assert (reply.tokens, reply.cached_tokens) == (oracle(prompt)[0], 0)
    assert pair.wire.cancelled == ["handover-0"]
    assert pair.handovers["late"] == 1
    pair.run()
    check_ended(pair)


def test_each_arrival_is_patience_for_the_next_up_to_a_limit() -> None:
    pair, prompt = Pair(), make_prompt(640)
    reply = pair.decode.submit(prompt)
    while not pair.wire.sent:
        pair.step()
    pair.step()
    for _ in range(2):  # patience is twice 640 seconds
        pair.now += 1_000
        num_sent = len(pair.wire.sent)
        while len(pair.wire.sent) == num_sent:
            pair.step()
    assert pair.decode.loop.scheduler.requests[reply.id].phase == "loading"
    pair.now += 1_300
    pair.decode.step()
    assert pair.handovers["late"] == 1
    pair.run()
    assert reply.tokens == oracle(prompt)[0]
    check_ended(pair)


def test_what_arrived_before_the_connection_was_lost_is_used() -> None:
    pair, prompt = Pair(components=(A,)), make_prompt(640)
    reply = pair.decode.submit(prompt)
    while len(pair.wire.sent) < 4:
        pair.step()
    pair.wire.deliver()
    pair.wire.disconnect()
    pair.run()
    assert reply.tokens == oracle(prompt, components=(A,))[0]
    assert 0 < reply.peer_tokens < 640
    assert pair.handovers["partial"] == 1
    check_ended(pair)


def test_a_payload_that_changed_on_its_way_is_never_used() -> None:
    pair, prompt = Pair(), make_prompt(500)
    pair.wire.damages = True
    reply = pair.ask(prompt, max_tokens=20)
    assert reply.tokens == oracle(prompt, max_tokens=20)[0]
    assert (reply.cached_tokens, reply.peer_tokens) == (0, 0)
    assert pair.wire.store is not None
    assert pair.wire.store.counters().damaged >= 1
    check_ended(pair)


def test_a_prefill_engine_whose_queue_is_full_refuses_and_the_prompt_is_computed() -> None:
    pair, prompt = Pair(), make_prompt(500)
    pair.prefill.loop.scheduler.admission.limits = pair.prefill.loop.scheduler.limits.__class__(
        max_queue=0
    )
    reply = pair.ask(prompt)
    assert (reply.tokens, reply.cached_tokens) == (oracle(prompt)[0], 0)
    assert (pair.pushes["refused"], pair.handovers["partial"]) == (1, 1)
    check_ended(pair)


def test_requests_with_one_prompt_wait_for_one_hand_over() -> None:
    pair, prompt = Pair(), make_prompt(500)
    replies = [pair.decode.submit(prompt, max_tokens=n) for n in (4, 9)]
    pair.run()
    assert [reply.tokens for reply in replies] == [oracle(prompt, max_tokens=n)[0] for n in (4, 9)]
    assert [reply.peer_tokens for reply in replies] == [500, 500]
    assert pair.handovers["asked"] == 1
    check_ended(pair)


def test_prompts_that_begin_alike_do_not_take_each_others_entries_away() -> None:
    pair = Pair()
    prompts = [[*make_prompt(320), *make_prompt(300, family)] for family in (7, 8, 9)]
    replies = [pair.decode.submit(prompt) for prompt in prompts]
    pair.run()
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.tokens == oracle(prompt)[0]
        assert reply.cached_tokens == 620
    check_ended(pair)


@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_a_client_that_disconnects_ends_the_hand_over(num_steps: int) -> None:
    pair, prompt = Pair(), make_prompt(640)
    reply = pair.decode.submit(prompt)
    pair.step(num_steps)
    pair.decode.loop.abort(reply.id)
    pair.run()
    assert reply.finish == "abort"
    assert pair.wire.cancelled == ["handover-0"]
    assert pair.handovers["cancelled"] == 1
    check_ended(pair)


def test_short_prompts_and_those_of_hand_overs_are_computed_here() -> None:
    pair = Pair()
    assert pair.ask(make_prompt(255)).peer_tokens == 0
    assert pair.handovers["asked"] == 0
    reply = pair.decode.submit(make_prompt(500), prompt_logprobs=1)
    pair.run()
    assert (reply.peer_tokens, pair.handovers["asked"]) == (0, 0)
    check_ended(pair)


def test_bytes_end_hand_overs_that_keep_some_and_no_others() -> None:
    """Two that keep the same bytes, one that keeps some beside them, and one that keeps none."""
    pair = Pair(components=(A,))
    known, other = make_prompt(200, 1), make_prompt(120, 2)
    for prompt in (known, other):
        pair.decode.ask(prompt, max_tokens=1)
    scheduler = pair.decode.loop.scheduler
    assert scheduler.cache is not None
    prompts = [
        [*start, *make_prompt(400, 9 + n)] for n, start in enumerate((known, known, other, []))
    ]
    replies = [pair.decode.submit(prompt) for prompt in prompts]
    pair.decode.step()
    before = scheduler.cache.evictable_bytes
    (handovers,) = scheduler.traffic._handovers
    assert handovers.give_up(1)
    assert scheduler.cache.evictable_bytes > before
    assert pair.wire.cancelled == ["handover-2"], "the youngest that keeps any"
    assert handovers.give_up(1 << 40)
    assert pair.wire.cancelled[1:] == ["handover-0", "handover-1"]
    assert not handovers.give_up(1)
    pair.run()
    assert [reply.tokens for reply in replies] == [
        oracle(prompt, components=(A,))[0] for prompt in prompts
    ]
    assert [reply.peer_tokens > 0 for reply in replies] == [False, False, False, True]
    check_ended(pair)


def test_what_arrives_while_all_of_the_store_is_being_read_waits_for_room() -> None:
    pair, prompt = Pair(), make_prompt(500)
    store = pair.wire.store
    assert store is not None
    for area in store._areas:
        area.num_readers, area.end = 1, area.memory.nbytes
    reply = pair.decode.submit(prompt)
    pair.step(30)
    assert not store.entries()
    for area in store._areas:  # the steps that read have ended
        area.num_readers = 0
    pair.run()
    assert (reply.tokens, reply.peer_tokens) == (oracle(prompt)[0], 500)
    assert (pair.handovers["partial"], store.counters().write_errors) == (0, 0)
    check_ended(pair)


def test_bytes_that_running_replies_need_end_the_wait() -> None:
    row = FakeBackend().row_bytes(700)
    pair = Pair(decode={"capacity_bytes": 2 * row})
    stream = pair.decode.submit(make_prompt(200, 4), max_tokens=900)
    pair.step(4)
    reply = pair.decode.submit(make_prompt(500))
    for _ in range(700):
        pair.decode.step()
    pair.run()
    assert stream.tokens == oracle(stream.prompt, max_tokens=900)[0]
    assert reply.tokens == oracle(make_prompt(500))[0]
    check_ended(pair)
