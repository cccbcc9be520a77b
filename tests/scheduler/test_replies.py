"""How requests join and end: each gets the oracle's tokens and exactly one terminal message."""

from __future__ import annotations

import random

import pytest

from builders import ALL, Client, check_idle, make_client, make_prompt, oracle
from cases import cases
from pippin.cache.policy import MAX_STRIDE
from pippin.messages import Submit, pack_tokens
from pippin.types import Component, SamplingParams

both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


@both_modes
def test_requests_that_join_at_different_steps_do_not_disturb_each_other(overlap: bool) -> None:
    client = make_client(overlap=overlap, num_slots=3)
    for number in range(8):
        client.submit(make_prompt(5 + 30 * number, number), max_tokens=3 + number)
        client.step()
    client.run()
    for number, reply in enumerate(client.replies.values()):
        prompt = make_prompt(5 + 30 * number, number)
        assert (reply.tokens, reply.finish) == oracle(prompt, max_tokens=3 + number)
    check_idle(client)


@both_modes
def test_a_reply_ends_at_a_stop_id_which_is_delivered(overlap: bool) -> None:
    tokens, _ = oracle(make_prompt(10), max_tokens=20)
    reply = make_client(overlap=overlap).ask(
        make_prompt(10), max_tokens=20, stop_ids=[tokens[5], tokens[9]]
    )
    assert reply.tokens == tokens[:6]
    assert reply.finish == "stop"


@both_modes
def test_replies_are_cached_to_their_last_token_and_at_every_checkpoint(overlap: bool) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        client = make_client(overlap=overlap, num_slots=3, chunk=rng.choice((16, 100)))
        for _ in range(5):
            prompt = make_prompt(rng.randrange(1, 200), rng.randrange(2))
            client.submit(prompt, max_tokens=rng.randrange(1, 300), stop_ids=range(seed % 3))
            client.step(rng.randrange(20))
        client.run()
        cache = client.loop.scheduler.cache
        assert cache is not None
        for reply in client.replies.values():
            whole = [*reply.prompt, *reply.tokens]
            assert cache.probe(whole) == cache.probe([*whole, 1000]) == len(whole)
            for position in range(MAX_STRIDE, len(whole), MAX_STRIDE):
                assert cache.probe(whole, limit=position) == position


@both_modes
def test_min_tokens_holds_stop_ids_back(overlap: bool) -> None:
    stop_ids = range(48)  # every other token would stop
    reply = make_client(overlap=overlap).ask(
        make_prompt(10), max_tokens=30, min_tokens=12, stop_ids=stop_ids
    )
    assert len(reply.tokens) > 12
    assert not set(reply.tokens[:12]) & set(stop_ids)
    assert reply.finish == "stop"


@both_modes
def test_unseeded_requests_differ(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    replies = [client.submit(make_prompt(9), temperature=1.0, max_tokens=8) for _ in range(3)]
    client.run()
    assert len({tuple(reply.tokens) for reply in replies}) == 3


@both_modes
@cases("steps", range(9))
def test_an_abort_is_answered_at_once_whatever_the_phase(overlap: bool, steps: int) -> None:
    """Waiting, between chunks, with its last chunk in flight, decoding, about to finish."""
    client = make_client(overlap=overlap, num_slots=2, chunk=64)
    others = [client.submit(make_prompt(100, 1), max_tokens=6) for _ in range(2)]
    reply = client.submit(make_prompt(200, 2), max_tokens=4)
    client.step(steps)
    client.loop.abort(reply.id)
    client.step()
    assert reply.finish == "abort"
    client.run()
    assert reply.tokens == oracle(make_prompt(200, 2))[0][: len(reply.tokens)]
    for other in others:
        assert (other.tokens, other.finish) == oracle(make_prompt(100, 1), max_tokens=6)
    check_idle(client)


@both_modes
def test_a_stop_string_ends_a_request_as_finished_and_its_reply_is_cached(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    reply = client.submit(make_prompt(100), max_tokens=50)
    while len(reply.tokens) < 7:
        client.step()
    client.loop.finish(reply.id)
    client.run()
    assert reply.finish == "stop"
    assert reply.tokens == oracle(make_prompt(100), max_tokens=50)[0][:7]
    next_turn = client.ask([*make_prompt(100), *reply.tokens, 5, 6])
    assert next_turn.cached_tokens == 107
    check_idle(client)


def test_messages_about_requests_that_have_ended_or_never_were_are_ignored() -> None:
    client = make_client()
    reply = client.ask(make_prompt(5))
    client.loop.abort(reply.id)
    client.loop.finish(reply.id)
    client.loop.abort("nobody")
    client.run()
    assert reply.finish == "length"


@both_modes
def test_slots_are_reused_and_the_lowest_goes_first(overlap: bool) -> None:
    client = make_client(overlap=overlap, num_slots=2)
    for number in range(20):
        client.submit(make_prompt(10, number), max_tokens=1 + number % 4)
    client.run()
    for number, reply in enumerate(client.replies.values()):
        assert reply.tokens == oracle(make_prompt(10, number), max_tokens=1 + number % 4)[0]
    assert sorted(client.loop.scheduler.slots._free) == [1, 2]


@both_modes
@pytest.mark.parametrize("components", [ALL, (Component.ATTENTION,), (Component.STATE,)])
def test_the_next_turn_finds_the_reply_even_if_it_is_sent_at_once(
    overlap: bool, components: tuple[Component, ...]
) -> None:
    client = make_client(overlap=overlap, components=components)
    reply = client.submit(make_prompt(80), max_tokens=70)
    while reply.finish is None:
        client.step()
    prompt = [*make_prompt(80), *reply.tokens, 1, 2, 3]
    turn = client.ask(prompt)
    assert turn.cached_tokens == 150
    assert turn.tokens == oracle(prompt, components=components)[0]


def logprob_counts(client: Client) -> list[int]:
    return [len(reply.logprobs) for reply in client.replies.values()]


@both_modes
def test_logprobs_come_with_every_token_of_those_who_asked(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    client.submit(make_prompt(5), logprobs=2)
    client.submit(make_prompt(6, 1))
    client.run()
    assert logprob_counts(client) == [4, 0]


def test_a_prompt_that_cannot_fit_the_model_is_refused_with_both_numbers() -> None:
    client = make_client(max_len=100)
    reply = client.ask(make_prompt(90), max_tokens=11)
    assert reply.finish == "error"
    assert reply.error_status == 400
    assert "90" in (reply.error or "")
    assert "100" in (reply.error or "")
    assert client.ask(make_prompt(90), max_tokens=10).finish == "length"


@both_modes
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_id_in_use_is_not_taken_over(overlap: bool, steps: int) -> None:
    client = make_client(overlap=overlap)
    first = client.submit(make_prompt(10), id="same", max_tokens=4)
    client.step(steps)
    assert not client.loop.idle
    with pytest.raises(AssertionError, match="request id same is in use"):
        client.loop.submit(Submit("same", pack_tokens(make_prompt(20)), SamplingParams()))
    client.run()
    assert (first.tokens, first.finish) == oracle(make_prompt(10), max_tokens=4)
    check_idle(client)


def test_a_full_queue_answers_503() -> None:
    client = make_client(num_slots=1, max_queue=2)
    replies = [client.submit(make_prompt(5, number)) for number in range(4)]
    client.run()
    assert [reply.finish for reply in replies] == ["length", "length", "error", "error"]
    assert replies[2].error_status == 503
    assert "queue holds 2" in (replies[2].error or "")


@both_modes
def test_a_reply_that_ends_where_a_checkpoint_is_leaves_no_second_state(overlap: bool) -> None:
    client = make_client(overlap=overlap, components=ALL)
    client.ask(make_prompt(MAX_STRIDE - 28), max_tokens=28)
    check_idle(client)


def test_a_loop_that_closes_waits_for_its_step_and_reports_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = make_client()
    client.submit(make_prompt(10), max_tokens=20)
    client.step(3)
    assert client.loop._in_flight is not None
    client.loop.close()
    assert client.backend.device_queue.done_step == client.loop.scheduler.committed
    assert not caplog.records
