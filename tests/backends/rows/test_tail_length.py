"""How long a tail is changes when rows move, and nothing that anybody says."""

from __future__ import annotations

from functools import cache

import pytest

from builders import Reply
from near_ties import assert_same
from pippin.backends.mlx.rows import arrays
from pippin.types import GRID
from serving import ask_all, check_idle, cold, make_client, make_prompt

pytestmark = pytest.mark.slow

MODELS = ("qwen3_5", "gpt_oss", "llama")  # a hybrid, one with windows, one with neither
NUM_TOKENS = 100


@cache
def usual_replies(name: str) -> list[Reply]:
    return ask_all(make_client(name), prompts_of(name), max_tokens=NUM_TOKENS)


def prompts_of(name: str) -> list[list[int]]:
    return [make_prompt(name, n, seed=n) for n in (20, 70, 130)]


@pytest.mark.parametrize("tail", [32, 96])
@pytest.mark.parametrize("name", MODELS)
def test_with_a_tail_of_any_length_replies_are_the_same_and_what_they_leave_is_right(
    name: str, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tail != GRID
    prompts, expected = prompts_of(name), usual_replies(name)
    monkeypatch.setattr(arrays, "TAIL", tail)
    client = make_client(name)
    replies = ask_all(client, prompts, max_tokens=NUM_TOKENS)
    assert_same(replies, expected)
    check_idle(client)
    turns = [[*p, *r.tokens, 5, 6, 7] for p, r in zip(prompts, replies, strict=True)]
    later = ask_all(client, turns)
    assert all((reply.cached_tokens or 0) >= GRID for reply in later)
    assert_same(later, cold(name, turns))
