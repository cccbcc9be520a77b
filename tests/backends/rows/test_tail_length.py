"""How long a tail is changes when rows move, and nothing that anybody says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from builders import Reply
from pippin.backends.mlx.rows import arrays
from pippin.types import GRID
from serving import BUNDLED, CLEAR, ask_all, check_idle, make_client, make_prompt

MODELS = (BUNDLED, "gpt_oss", "llama")  # a hybrid, one with windows, one with neither
NUM_TOKENS = 100


def num_clear(reply: Reply) -> int:
    """How many tokens come before the first choice that may hang on rounding."""
    for place, scored in enumerate(reply.logprobs):
        best, second = sorted(scored.top_logprobs)[-1:-3:-1]
        if best - second <= CLEAR:
            return place
    return len(reply.tokens)


def ask(name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Replies, each up to where it stops being clear."""
    client = make_client(name)
    replies = ask_all(client, prompts, max_tokens=NUM_TOKENS)
    check_idle(client)
    return [reply.tokens[: num_clear(reply)] for reply in replies]


@pytest.mark.parametrize("tail", [32, 96])
@pytest.mark.parametrize("name", MODELS)
def test_a_tail_need_not_be_as_long_as_the_grid(
    name: str, tail: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tail != GRID
    prompts = [make_prompt(name, n, seed=n) for n in (20, 70, 130)]
    expected = ask(name, prompts)
    monkeypatch.setattr(arrays, "TAIL", tail)
    said = ask(name, prompts)
    compared = [min(len(a), len(b)) for a, b in zip(said, expected, strict=True)]
    assert sum(compared) > NUM_TOKENS
    for mine, theirs, num_tokens in zip(said, expected, compared, strict=True):
        assert mine[:num_tokens] == theirs[:num_tokens]


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
    fresh = ask_all(make_client(name, cache=False), turns)
    for warm, cold in zip(later, fresh, strict=True):
        clear = min(num_clear(warm), num_clear(cold))
        assert warm.tokens[:clear] == cold.tokens[:clear]
    assert sum(num_clear(reply) for reply in later) > 0
