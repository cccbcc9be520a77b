"""What is not a number stays with the request it came from.

Nothing of one request is added to another's, but a masked column weighs zero, and zero times
infinity is not a number: whatever requests leave behind must be finite, or gone.
"""

from __future__ import annotations

import math
from functools import cache

import mlx.nn as nn
import numpy as np
import pytest

from builders import Client, Reply
from families import build
from near_ties import assert_same
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.rows import mains, memory
from serving import make_client, make_prompt

pytestmark = pytest.mark.slow

POISON = 255  # a token whose embedding is not finite
HARMLESS = 254
# A hybrid of two kinds, one with windows, a plain one, one that attends in its own way.
MODELS = ("qwen3_5", "falcon_h1", "gpt_oss", "llama", "deepseek_v3")


@cache
def poisonous(name: str, value: float) -> LoadedModel:
    model, config = build(name)
    (embedding,) = [part for _, part in model.named_modules() if isinstance(part, nn.Embedding)]
    embedding.weight[POISON] = value
    return prepare(model, config)


def prompts_of(name: str, token: int) -> list[list[int]]:
    """Two that hold the token, among others that begin alike, and one of its own."""
    start = [t for t in make_prompt(name, 60, seed=1) if t != POISON][:50]
    tails = [make_prompt(name, n, seed=n) for n in (5, 9, 14, 30)]
    clean = [[t % POISON for t in [*start, *tail]] for tail in tails]
    bad = [[*start, token, 7, 8], [9, token, *start[:20]]]
    return [clean[0], bad[0], clean[1], bad[1], clean[2], [t % POISON for t in tails[3]]]


def replies_to(client: Client, name: str, token: int) -> list[Reply]:
    """The poisoned come, go, and come again while the others speak."""
    prompts = prompts_of(name, token)
    is_bad = [token in prompt for prompt in prompts]
    never = {"logprobs": 2, "logit_bias": {POISON: -100.0}}  # nobody says it by chance
    replies = [
        client.submit(prompt, max_tokens=6 if bad else 40, **never)
        for prompt, bad in zip(prompts, is_bad, strict=True)
    ]
    while any(bad and not r.finish for r, bad in zip(replies, is_bad, strict=True)):
        client.step()
    late = [client.submit([*p[:-1], 3], max_tokens=20, **never) for p in prompts]
    client.run()
    return [r for r, bad in zip([*replies, *late], [*is_bad, *is_bad], strict=True) if not bad]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_that_is_not_a_number_changes_nothing_for_others(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "TAIL", 24)
    monkeypatch.setattr(mains, "FEWEST_SHARED", 8)
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 0)
    model = poisonous(name, value)
    spoiled = replies_to(make_client(name, model=model), name, POISON)
    clean = replies_to(make_client(name, model=model), name, HARMLESS)
    assert np.isfinite([scored.logprob for reply in spoiled for scored in reply.logprobs]).all()
    assert_same(spoiled, clean)
