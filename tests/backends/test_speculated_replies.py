"""Replies with drafts through the scheduler and the prefix cache equal those without, on mlx."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

import pytest

from builders import Client
from cases import cases
from oracle_drafter import OracleDrafter
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from serving import BUNDLED, make_client, make_prompt, spec_of

MODELS = ("qwen3_5", "llama", "gpt_oss")
NUM_REPLIES, MAX_DEPTH = 5, 4


def params_of(number: int) -> dict[str, Any]:
    sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
    return {"max_tokens": 40 + 15 * number, **sampled}


def prompts_of(name: str) -> list[list[int]]:
    """Some begin alike."""
    first = make_prompt(name, 80, 0)
    others = [make_prompt(name, 10 + 30 * number, number) for number in range(1, NUM_REPLIES)]
    return [first, *(first[: 20 * number] + found for number, found in enumerate(others))]


def replies_of(client: Client, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each starts while others run."""
    replies = []
    for number, prompt in enumerate(prompts):
        replies.append(client.submit(prompt, **params_of(number)))
        client.step(3)
    client.run()
    return [reply.tokens for reply in replies]


@cache
def without_drafts(name: str, *, overlap: bool) -> list[list[int]]:
    return replies_of(make_client(name, overlap=overlap), prompts_of(name))


@cases("name", MODELS)
@cases("overlap", [True, False], ids=["overlap", "no overlap"])
@cases("share", [0.0, 0.7, 1.0])
def test_replies_are_those_without_drafts_cold_and_warm(
    name: str, overlap: bool, share: float
) -> None:
    prompts = prompts_of(name)
    expected = without_drafts(name, overlap=overlap)
    known = {tuple(prompt): reply for prompt, reply in zip(prompts, expected, strict=True)}

    def reply_of(request: Request) -> Sequence[int]:
        return known[tuple(request.prompt.tolist())]

    drafter, depths = OracleDrafter(reply_of, share, spec_of(name).vocab_size), count()
    speculation = Speculation(drafter, MAX_DEPTH, lambda _: next(depths) % (MAX_DEPTH + 1))
    client = make_client(name, overlap=overlap, speculation=speculation)
    assert replies_of(client, prompts) == expected
    assert replies_of(client, prompts) == expected  # restored from what was captured with drafts
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 0
    if share == 1.0:
        assert metrics.accepted_tokens == metrics.drafted_tokens


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_replies_are_those_without_drafts_by_the_models_own_head(overlap: bool) -> None:
    prompts = prompts_of(BUNDLED)[:3]
    expected = replies_of(make_client(BUNDLED, overlap=overlap), prompts)
    depths = count()
    speculation = Speculation(
        None,
        MAX_DEPTH,
        lambda _: next(depths) % (MAX_DEPTH + 1),
        device=DeviceDrafter("mtp", MAX_DEPTH),
    )
    client = make_client(BUNDLED, overlap=overlap, speculation=speculation)
    assert replies_of(client, prompts) == expected
    assert replies_of(client, prompts) == expected
    assert client.loop.scheduler.metrics.accepted_tokens > 10
