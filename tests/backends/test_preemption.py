"""Replies that outgrow the budget together are what each is alone, on real models."""

from __future__ import annotations

import pytest

from builders import Reply
from near_ties import count_same
from pippin.scheduler import admission, memory
from serving import TORCH_MODELS, make_client, make_prompt

NUM_REQUESTS = 16
NUM_ROWS = 6  # that the budget holds
REPLY_LEN = 18
GROWTH = 4  # tokens that a row claims ahead; few, so that short replies outgrow it

# Hybrid, windowed, plain.
CHECKPOINTS = ("qwen3_5", "gpt_oss", "llama", "llama4", *TORCH_MODELS)


def prompt_of(name: str, number: int) -> list[int]:
    """Each crosses a block of 64 with its reply, and takes more room from then on."""
    return make_prompt(name, 50 + number % 12, seed=number)


def params_of(number: int) -> dict[str, object]:
    """Greedy; every fourth is sampled with penalties, and every third may not end early."""
    params: dict[str, object] = {"max_tokens": REPLY_LEN, "logprobs": 2}
    if number % 4 == 0:
        params |= {"temperature": 0.9, "seed": number, "top_p": 0.9, "frequency_penalty": 0.3}
    if number % 3 == 0:
        params |= {"min_tokens": 15, "stop_ids": [5, 6, 7]}
    return params


def num_drawn_alike(reply: Reply, expected: Reply) -> int:
    """Tokens before two draws part: a rare one may hang on the last digit of a log probability."""
    pairs = zip(reply.tokens, expected.tokens, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(reply.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_preempted_replies_are_what_each_is_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (admission, memory):
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
        assert client.loop.scheduler.metrics.preemptions > 0
        compared = 0
        for number, (reply, alike) in enumerate(zip(replies, expected, strict=True)):
            drawn = "seed" in params_of(number)
            compared += num_drawn_alike(reply, alike) if drawn else count_same(reply.tokens, alike)
            assert len(reply.logprobs) == len(reply.tokens)
        assert compared > 0.9 * sum(len(reply.tokens) for reply in expected)
        assert all(reply.finish in ("length", "stop") for reply in replies)
        assert client.loop.scheduler.budget.claimed == 0
