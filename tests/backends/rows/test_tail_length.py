"""How long a tail is changes when rows move, and nothing that anybody says."""

from __future__ import annotations

import pytest

from near_ties import assert_same
from pippin.backends.mlx.rows import arrays
from pippin.types import GRID
from serving import ask_all, check_idle, cold, make_client, make_prompt

pytestmark = pytest.mark.slow

MODELS = ("qwen3_5", "gpt_oss", "llama")  # a hybrid, one with windows, one with neither
NUM_TOKENS = 100


@pytest.mark.parametrize("tail", [32, 96])
@pytest.mark.parametrize("name", MODELS)
def test_a_tail_need_not_be_as_long_as_the_grid(
    name: str, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tail != GRID
    prompts = [make_prompt(name, n, seed=n) for n in (20, 70, 130)]
    expected = ask_all(make_client(name), prompts, max_tokens=NUM_TOKENS)
    monkeypatch.setattr(arrays, "TAIL", tail)
    client = make_client(name)
    assert_same(ask_all(client, prompts, max_tokens=NUM_TOKENS), expected)
    check_idle(client)


@pytest.mark.parametrize("tail", [32, 96])
@pytest.mark.parametrize("name", MODELS)
def test_what_replies_leave_in_the_cache_is_right_with_any_tail(
    name: str, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "TAIL", tail)
    client = make_client(name)
    prompts = [make_prompt(name, n, seed=n) for n in (20, 70, 130)]
    replies = ask_all(client, prompts, max_tokens=NUM_TOKENS)
    turns = [[*p, *r.tokens, 5, 6, 7] for p, r in zip(prompts, replies, strict=True)]
    later = ask_all(client, turns)
    assert all((reply.cached_tokens or 0) >= GRID for reply in later)
    assert_same(later, cold(name, turns))
