"""Replies that outgrow the budget together are what each is alone, on real models."""

from __future__ import annotations

import pytest

from builders import Reply
from pippin.scheduler import admission, claims
from serving import BUNDLED, make_client, make_prompt

NUM_REQUESTS = 40
NUM_ROWS = 12  # that the budget holds
REPLY_LEN = 30
GROWTH = 4  # tokens that a row claims ahead; few, so that short replies outgrow it
CLEAR = 1e-3  # log probabilities apart: below this the order of float32 sums may decide

CHECKPOINTS = (BUNDLED, "gpt_oss", "llama")  # hybrid, windowed, plain


def prompt_of(name: str, number: int) -> list[int]:
    """Each crosses a block of 64 with its reply, and takes more room from then on."""
    return make_prompt(name, 40 + number % 20, seed=number)


def params_of(number: int) -> dict[str, object]:
    """Greedy; every fourth is sampled with penalties, and every third may not end early."""
    params: dict[str, object] = {"max_tokens": REPLY_LEN, "logprobs": 2}
    if number % 4 == 0:
        params |= {"temperature": 0.9, "seed": number, "top_p": 0.9, "frequency_penalty": 0.3}
    if number % 3 == 0:
        params |= {"min_tokens": 25, "stop_ids": [5, 6, 7]}
    return params


def num_clear(reply: Reply) -> int:
    """Tokens before the first whose choice hangs on rounding."""
    for index, scored in enumerate(reply.logprobs):
        best, second = sorted(scored.top_logprobs)[-1:-3:-1]
        if best - second < CLEAR:
            return index
    return len(reply.tokens)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_retracted_replies_are_what_each_is_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, claims):
        monkeypatch.setattr(module, "GROWTH_TOKENS", GROWTH)
    alone = make_client(name, cache=False)
    expected = [
        alone.ask(prompt_of(name, number), **params_of(number)) for number in range(NUM_REQUESTS)
    ]
    row_bytes = alone.loop.backend.row_bytes(64)
    for overlap in (True, False):
        client = make_client(name, overlap=overlap, capacity_bytes=NUM_ROWS * row_bytes)
        replies = [
            client.submit(prompt_of(name, number), **params_of(number))
            for number in range(NUM_REQUESTS)
        ]
        client.run()
        assert client.loop.scheduler.metrics.retractions > 0
        compared = 0
        for reply, reference in zip(replies, expected, strict=True):
            clear = num_clear(reference)
            assert reply.tokens[:clear] == reference.tokens[:clear]
            assert len(reply.logprobs) == len(reply.tokens)
            compared += clear
        assert compared > 0.8 * sum(len(reply.tokens) for reply in expected)
        assert all(reply.finish in ("length", "stop") for reply in replies)
        assert client.loop.scheduler.budget.claimed == 0
