"""Rows of mlx whose state may lack accepted drafts, beyond what `test_draft_contract.py` asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pippin.backends.base import (
    PrefillRow,
)
from pippin.backends.mlx.backend import MLXBackend
from serving import served
from test_contract import NUM_SLOTS, Steps
from test_draft_contract import MAX_DEPTH, Reply, started

every_drafting = pytest.mark.parametrize("name", ["qwen3_5", "llama", "gpt_oss"])


def make_steps(name: str) -> Steps:
    options: dict[str, Any] = {"max_depth": MAX_DEPTH, "fingerprints": True, "debug": True}
    return Steps(MLXBackend(served(name), num_slots=NUM_SLOTS, **options))


@every_drafting
def test_a_row_that_steps_pass_over_keeps_the_drafts_that_it_accepted(name: str) -> None:
    steps = make_steps(name)
    reply, busy = Reply(f"mlx, {name}", 1, 9, 1), Reply(f"mlx, {name}", 2, 14, 2)
    started(steps, reply, busy)
    while len(reply.tokens) < 17:
        at = len(reply.tokens)
        wrong = [place for place in range(at, at + 4) if place % 4 == 3]
        reply.settle(steps.run(decode=(reply.row(3, wrong),)))
        for _ in range(2):
            busy.settle(steps.run(decode=(busy.row(min(1, 36 - len(busy.tokens))),)))
    reply.check()
    busy.check()


@every_drafting
def test_forced_tokens_follow_accepted_drafts(name: str) -> None:
    """A chunk of a reply, as where a grammar forces tokens, is as good as decoding them."""
    steps, reply = make_steps(name), Reply(f"mlx, {name}", 1, 11)
    started(steps, reply)
    reply.settle(steps.run(decode=(reply.row(3),)))
    at = len(reply.tokens) - 1  # the token that was sampled last
    forced = np.array(reply.expected.tokens[at : at + 3], dtype=np.int32)
    result = steps.run(prefill=(PrefillRow(1, reply.bound, forced, samples=True),))
    reply.tokens += [*reply.expected.tokens[at + 1 : at + 3], *result.tokens[1]]
    reply.bound += 3
    while len(reply.tokens) < 20:
        reply.settle(steps.run(decode=(reply.row(2),)))
    reply.check()


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "deepseek_v3"])
def test_models_whose_rows_verify_no_drafts_say_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend = MLXBackend(served(name), num_slots=2, max_depth=2)
    assert backend.max_depth == 0
    assert "no drafts are verified" in caplog.text


def test_deterministic_rows_verify_no_drafts_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    backend = MLXBackend(served("llama"), num_slots=2, max_depth=2, deterministic=True)
    assert backend.max_depth == backend.drafts_itself == 0
    assert "no drafts are verified: with --deterministic" in caplog.text
