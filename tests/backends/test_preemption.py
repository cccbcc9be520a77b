"""Replies that outgrow the budget together are what each is alone, on real models."""

from __future__ import annotations

from typing import Any

import pytest
from test_speculated_replies import speculation

from builders import Client, Reply
from near_ties import count_same
from pippin.scheduler import admission, memory
from processes import is_installed
from serving import (
    BUNDLED,
    DRAFTED_BY,
    TORCH,
    TORCH_MODELS,
    make_backend,
    make_client,
    make_prompt,
)

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


def check_preempted(client: Client, asked: list[dict[str, Any]], expected: list[Reply]) -> None:
    replies = [client.submit(**each) for each in asked]
    client.run()
    assert client.loop.scheduler.metrics.preemptions > 0
    compared = 0
    for each, reply, alike in zip(asked, replies, expected, strict=True):
        assert reply.finish in ("length", "stop")
        drawn = "seed" in each
        compared += num_drawn_alike(reply, alike) if drawn else count_same(reply.tokens, alike)
        assert len(reply.logprobs) == (len(reply.tokens) if "logprobs" in each else 0)
    assert compared > 0.9 * sum(len(reply.tokens) for reply in expected)
    assert client.loop.scheduler.budget.claimed == 0


@pytest.fixture(autouse=True)
def _few_tokens_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (admission, memory):
        monkeypatch.setattr(module, "GROWTH_TOKENS", GROWTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_preempted_replies_are_what_each_is_alone(name: str) -> None:
    alone = make_client(name, cache=False)
    asked = [{"prompt": prompt_of(name, n), **params_of(n)} for n in range(NUM_REQUESTS)]
    expected = [alone.ask(**each) for each in asked]
    row_bytes = alone.loop.backend.row_bytes(64)
    for overlap in (True, False):
        client = make_client(name, overlap=overlap, capacity_bytes=NUM_ROWS * row_bytes)
        check_preempted(client, asked, expected)


MAX_DEPTH = 3
DRAFTING = [(BUNDLED, True), (f"llama{DRAFTED_BY}llama", True)]  # and whether steps overlap
if is_installed("torch"):
    DRAFTING += [(f"{TORCH}qwen3_5_mtp", overlap) for overlap in (True, False)]
    DRAFTING += [(f"{TORCH}qwen3{DRAFTED_BY}qwen3", True)]


@pytest.mark.parametrize(("name", "overlap"), DRAFTING)
def test_preempted_replies_with_drafts_are_what_each_is_alone(name: str, overlap: bool) -> None:
    """Of the backend itself; with log probabilities there are none."""
    asked = [
        {"prompt": make_prompt(name, 50 + n, seed=n), "max_tokens": 20}
        | ({"temperature": 1.0, "seed": n} if n % 2 else {})
        for n in range(5)
    ]
    alone = make_client(name, cache=False)
    expected = [alone.ask(logprobs=2, **each) for each in asked]
    row_bytes = make_backend(name, 1, max_depth=MAX_DEPTH).row_bytes(64)
    client = make_client(
        name,
        speculation=speculation(None, lambda number: (1, 3, 0, 2, 3)[number % 5], MAX_DEPTH),
        capacity_bytes=2 * row_bytes,
        overlap=overlap,
    )
    check_preempted(client, asked, expected)
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 40
    if DRAFTED_BY in name:  # also behind what it was resumed with
        assert metrics.accepted_tokens > 0.97 * metrics.drafted_tokens
