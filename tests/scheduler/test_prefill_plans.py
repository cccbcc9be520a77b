"""Chunked prefill: any length, any chunk, honest counts, no prefix computed twice."""

from __future__ import annotations

import pytest

from builders import ALL, Client, check_idle, make_client, make_prompt, oracle
from cases import cases
from pippin.backends.fake import FakeBackend
from pippin.scheduler.admission import REPLY_TOKENS
from pippin.types import Component

A, W, S = Component.ATTENTION, Component.WINDOW, Component.STATE
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
CHUNK = 128


@both_modes
@cases("state_taps", [True, False])
@cases("chunk", [1, 63, 64, 65, CHUNK])
@cases("length", [1, 63, 64, 65, 2 * CHUNK + 1])
def test_every_prompt_length_in_every_chunk_size(
    overlap: bool, state_taps: bool, chunk: int, length: int
) -> None:
    client = make_client(overlap=overlap, state_taps=state_taps, chunk=chunk)
    cold = client.ask(make_prompt(length))
    assert (cold.tokens, cold.finish) == oracle(make_prompt(length))
    assert cold.cached_tokens == 0
    assert client.backend.device_queue.tokens_run == length
    warm = client.ask(make_prompt(length))
    assert warm.tokens == cold.tokens
    assert client.backend.device_queue.tokens_run == 2 * length - (warm.cached_tokens or 0)
    check_idle(client)


@pytest.mark.parametrize(
    ("components", "cached"), [((A,), 199), ((A, W), 199), ((S,), 192), ((A, S), 192), (ALL, 192)]
)
def test_without_a_known_head_the_same_prompt_again_recomputes_only_what_gives_logits(
    components: tuple[Component, ...], cached: int
) -> None:
    client = make_client(backend=FakeBackend(components=components, knows_head=False))
    client.ask(make_prompt(200))
    assert client.ask(make_prompt(200)).cached_tokens == cached


@both_modes
@cases("components", [ALL, (A,), (S,), (W, S)])
def test_cached_tokens_is_what_was_not_computed(
    overlap: bool, components: tuple[Component, ...]
) -> None:
    client = make_client(overlap=overlap, components=components, num_slots=3, chunk=100)
    prompts = [make_prompt(90 + 17 * n, n % 2) + make_prompt(n, 9) for n in range(12)]
    for prompt in prompts:
        client.submit(prompt, max_tokens=3)
        client.step(2)
    client.run()
    saved = sum(reply.cached_tokens or 0 for reply in client.replies.values())
    assert saved > 0
    assert client.backend.device_queue.tokens_run == sum(map(len, prompts)) - saved
    assert client.loop.scheduler.metrics.cached_tokens == saved
    assert client.loop.scheduler.metrics.computed_tokens == client.backend.device_queue.tokens_run


@both_modes
@pytest.mark.parametrize("state_taps", [True, False])
def test_requests_that_share_an_uncomputed_prefix_wait_for_the_first(
    overlap: bool, state_taps: bool
) -> None:
    client = make_client(overlap=overlap, state_taps=state_taps, num_slots=8, chunk=512)
    prompts = [make_prompt(256) + make_prompt(10, 100 + n) for n in range(5)]
    replies = [client.submit(prompt) for prompt in prompts]
    client.run()
    assert [reply.cached_tokens for reply in replies] == [0, 256, 256, 256, 256]
    assert client.backend.device_queue.tokens_run == 256 + 5 * 10
    for prompt, reply in zip(prompts, replies, strict=True):
        assert reply.tokens == oracle(prompt)[0]


def test_those_who_wait_for_a_prefix_let_strangers_by_and_do_not_age() -> None:
    client = make_client(num_slots=8, chunk=64)
    client.submit(make_prompt(640))
    client.step()
    waiter = client.submit([*make_prompt(640), 1, 2])
    stranger = client.submit(make_prompt(20, 5), max_tokens=1)
    client.step(14)
    assert stranger.finish == "length"
    assert client.loop.scheduler.requests[waiter.id].passed_over == 0
    client.run()
    assert waiter.cached_tokens == 640


@both_modes
@pytest.mark.parametrize(
    ("reply_len", "cached"), [(REPLY_TOKENS, 80 + REPLY_TOKENS), (REPLY_TOKENS - 1, 80)]
)
def test_the_next_turn_waits_for_a_reply_that_is_on_its_way_into_the_tree(
    overlap: bool, reply_len: int, cached: int
) -> None:
    """It comes at once, while the step that brings the reply is not even planned."""
    client = make_client(overlap=overlap, num_slots=8)
    client.submit(make_prompt(20, 7), max_tokens=200)  # another stream keeps running
    prompt = make_prompt(80)
    turn = client.submit(prompt, max_tokens=reply_len)
    while turn.finish is None:
        client.step()
    following = client.submit([*prompt, *turn.tokens, 1, 2, 3])
    stranger = client.submit([*prompt, *turn.tokens[:-1], 0, 1, 2, 3])  # leaves the reply
    client.run()
    assert following.cached_tokens == cached
    assert stranger.cached_tokens == 80
    check_idle(client)


def test_prompt_logprobs_compute_all_of_the_prompt_and_make_nobody_wait() -> None:
    client = make_client(num_slots=8, chunk=64)
    client.ask(make_prompt(128))
    scored = client.submit(make_prompt(256), prompt_logprobs=1)
    other = client.submit([*make_prompt(256), 3])
    client.step(2)
    assert client.loop.scheduler.requests[other.id].running
    client.run()
    assert scored.cached_tokens == 0


def test_chunks_end_at_boundaries_that_the_backend_cannot_tap() -> None:
    client = make_client(components=(A, S), state_taps=False, chunk=512)
    client.submit(make_prompt(300), boundaries=[130])
    ends = []
    while not client.loop.idle:
        client.step()
        launched = client.loop._in_flight
        ends += [row.end for row in launched.plan.prefill] if launched else []
    assert ends == [128, 256, 300]


def chunk_lens(client: Client) -> list[int]:
    """Of the prompts in the step that is launched next."""
    client.step()
    launched = client.loop._in_flight
    return [len(row.tokens) for row in launched.plan.prefill] if launched else []


def test_a_step_serves_several_prompts_within_its_budget() -> None:
    client = make_client(num_slots=8, chunk=90)
    for number in range(4):
        client.submit(make_prompt(40, number))
    assert chunk_lens(client) == [40, 40]  # 10 are left
    assert chunk_lens(client) == [40, 40]


def test_no_prompt_is_cut_into_crumbs() -> None:
    """A forward of few tokens costs almost what one of half a grid block does."""
    client = make_client(num_slots=8, chunk=62)
    for number in range(3):
        client.submit(make_prompt(28, number))
    assert chunk_lens(client) == [28, 28]  # 6 are left
    assert chunk_lens(client) == [28]
    client.submit(make_prompt(300, 3))
    assert chunk_lens(client) == [43]
    client.submit(make_prompt(10, 4))
    assert chunk_lens(client) == [43, 10]  # all of it is more than a crumb
    client.submit(make_prompt(100, 5))
    assert [chunk_lens(client) for _ in range(3)] == [[42], [43], [43]]  # 20 are left
    client.run()
    check_idle(client)


@pytest.mark.parametrize(
    ("budget", "lens"),
    [
        (300, [256, 256, 256]),
        (100, [64, 64, 64]),
        (63, [43, 43, 42, 43, 43, 42]),
        (40, [32, 32, 32, 32]),
    ],
)
def test_chunks_of_a_long_prompt_end_on_the_grid_or_are_even_pieces_up_to_a_checkpoint(
    budget: int, lens: list[int]
) -> None:
    client = make_client(num_slots=8, chunk=budget)
    client.submit(make_prompt(1000))
    assert [chunk_lens(client) for _ in lens] == [[n] for n in lens]


def test_a_prompt_that_goes_on_off_the_grid_comes_back_to_it() -> None:
    client = make_client(num_slots=8, chunk=62)
    first = client.ask(make_prompt(28), max_tokens=1)
    client.submit([*make_prompt(28), *first.tokens, *make_prompt(200, 1)])
    assert [chunk_lens(client) for _ in range(4)] == [[50], [49], [32], [32]]


def test_a_prompt_that_takes_two_steps_is_halved() -> None:
    client = make_client(num_slots=8, chunk=32)
    client.submit(make_prompt(35))
    assert chunk_lens(client) == [18]
    client.submit(make_prompt(33, 1))  # 15 are left
    assert chunk_lens(client) == [17]
