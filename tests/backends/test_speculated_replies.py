"""Replies with drafts through the scheduler and the prefix cache equal those without.

By an oracle, by the models' own heads and by draft models, on mlx and on torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from typing import Any

import pytest

from builders import Client
from cases import cases
from oracle_drafter import OracleDrafter
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import DeviceDrafter, Drafter, Speculation
from processes import is_installed
from serving import BUNDLED, DRAFTED_BY, TORCH, make_client, make_prompt, spec_of

MODELS = ("qwen3_5", "llama", "gpt_oss")
NUM_REPLIES, MAX_DEPTH = 5, 4
SHORT = (17, 4)  # tokens of the first reply, and how many more each further one has


def prompts_of(name: str) -> list[list[int]]:
    """Some begin alike."""
    first = make_prompt(name, 80, 0)
    others = [make_prompt(name, 10 + 30 * number, number) for number in range(1, NUM_REPLIES)]
    return [first, *(first[: 20 * number] + found for number, found in enumerate(others))]


def replies_of(
    client: Client, prompts: Sequence[Sequence[int]], lengths: tuple[int, int] = (40, 15)
) -> list[list[int]]:
    """Each starts while others run; every second one is sampled."""
    replies = []
    for number, prompt in enumerate(prompts):
        params: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {}
        max_tokens = lengths[0] + lengths[1] * number
        replies.append(client.submit(prompt, max_tokens=max_tokens, **params))
        client.step(3)
    client.run()
    return [reply.tokens for reply in replies]


def speculation(
    drafter: Drafter | None = None,
    depth_of: Callable[[int], int] = lambda number: number % (MAX_DEPTH + 1),
    max_depth: int = MAX_DEPTH,
) -> Speculation:
    """`depth_of`: the number of a choice. Without a drafter the backend drafts itself."""
    numbers = count()
    device = None if drafter is not None else DeviceDrafter("mtp", max_depth)
    return Speculation(drafter, max_depth, lambda _: depth_of(next(numbers)), device=device)


@cache
def without_drafts(name: str, *, overlap: bool) -> list[list[int]]:
    return replies_of(make_client(name, overlap=overlap), prompts_of(name))


def check_replies_by_an_oracle(
    name: str, share: float, expected: list[list[int]], *, overlap: bool
) -> Client:
    """Cold, and restored from what was captured with drafts."""
    prompts = prompts_of(name)[: len(expected)]
    known = {tuple(prompt): reply for prompt, reply in zip(prompts, expected, strict=True)}

    def reply_of(request: Request) -> Sequence[int]:
        return known[tuple(request.prompt.tolist())]

    drafter = OracleDrafter(reply_of, share, spec_of(name).vocab_size)
    client = make_client(name, overlap=overlap, speculation=speculation(drafter))
    assert replies_of(client, prompts) == expected
    assert replies_of(client, prompts) == expected
    return client


@cases("name", MODELS)
@cases("overlap", [True, False], ids=["overlap", "no overlap"])
@cases("share", [0.0, 0.7, 1.0])
def test_replies_are_those_without_drafts_cold_and_warm(
    name: str, overlap: bool, share: float
) -> None:
    expected = without_drafts(name, overlap=overlap)
    client = check_replies_by_an_oracle(name, share, expected, overlap=overlap)
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 0
    if share == 1.0:
        assert metrics.accepted_tokens == metrics.drafted_tokens


OWN_DRAFTS = [(BUNDLED, True), (BUNDLED, False)]
OWN_DRAFTS += [(f"gpt_oss{DRAFTED_BY}gpt_oss", overlap) for overlap in (True, False)]
OTHERS_DRAFTS = [f"qwen3_5{DRAFTED_BY}llama"]
if is_installed("torch"):
    OWN_DRAFTS += [(f"{TORCH}qwen3_5_mtp", True)]
    OWN_DRAFTS += [(f"{TORCH}llama_windows{DRAFTED_BY}llama_windows", o) for o in (True, False)]
    OTHERS_DRAFTS += [f"{TORCH}qwen3_5{DRAFTED_BY}llama_{n}_vocab" for n in ("small", "large")]


@pytest.mark.parametrize(("name", "overlap"), OWN_DRAFTS)
def test_replies_are_those_without_drafts_of_the_backend_itself(name: str, overlap: bool) -> None:
    """At every depth, and restored from what was captured with drafts."""
    prompts = prompts_of(name)[:3]
    expected = replies_of(
        make_client(name.partition(DRAFTED_BY)[0], overlap=overlap), prompts, SHORT
    )
    client = make_client(name, overlap=overlap, speculation=speculation())
    for _ in ("cold", "warm"):
        assert replies_of(client, prompts, SHORT) == expected
    metrics = client.loop.scheduler.metrics
    if DRAFTED_BY in name:
        assert metrics.drafted_tokens > 60
        assert metrics.accepted_tokens > 0.97 * metrics.drafted_tokens
    elif name == BUNDLED:
        assert metrics.accepted_tokens > 10
    assert metrics.drafted_tokens > 0


@pytest.mark.parametrize("name", OTHERS_DRAFTS)
def test_replies_are_those_without_another_models_drafts(name: str) -> None:
    prompts = prompts_of(name)[:2]
    expected = replies_of(make_client(name.partition(DRAFTED_BY)[0]), prompts, SHORT)
    client = make_client(name, speculation=speculation(depth_of=lambda _: 3))
    assert replies_of(client, prompts, SHORT) == expected
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 60
    assert metrics.accepted_tokens < 0.3 * metrics.drafted_tokens
