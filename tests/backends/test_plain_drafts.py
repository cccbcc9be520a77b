"""Drafts on devices without operations of ours, in plain operations.

The same tokens as without drafts; the contract's own tests run here as they are.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_speculated_replies import (
    check_replies_by_an_oracle,
    prompts_of,
    replies_of,
    speculation,
)

import test_draft_contract as contract
from families import build
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations import without_operations
from pippin.backends.mlx.load import prepare
from serving import BUNDLED, make_client
from test_contract import Steps, alone

MAX_DEPTH = 4


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with without_operations():
        yield


@pytest.mark.parametrize(
    ("name", "overlap"), [("qwen3_5", False), ("qwen3_5", True), ("llama", True), ("gpt_oss", True)]
)
def test_replies_are_those_without_drafts_cold_and_warm(name: str, overlap: bool) -> None:
    """A hybrid, attention alone, and windows with experts: greedy and sampled, joining each other,
    past moves of tails into mains."""
    expected = replies_of(make_client(name, overlap=overlap), prompts_of(name)[:3])
    client = check_replies_by_an_oracle(name, 0.7, expected, overlap=overlap)
    assert client.loop.scheduler.metrics.accepted_tokens > 40


def test_replies_are_those_without_drafts_by_the_models_own_head() -> None:
    prompts = prompts_of(BUNDLED)[:2]
    expected = replies_of(make_client(BUNDLED), prompts)
    client = make_client(BUNDLED, speculation=speculation())
    assert replies_of(client, prompts) == expected
    assert client.loop.scheduler.metrics.accepted_tokens > 10


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_preempted_reply_goes_on_with_drafts(way: str) -> None:
    contract.test_a_preempted_reply_goes_on_with_drafts(f"mlx, {BUNDLED}", way)


def test_rows_of_every_depth_share_a_step() -> None:
    contract.test_rows_of_every_depth_share_a_step("mlx, qwen3_5")
    contract.test_rows_that_cannot_speculate_run_beside_those_that_do("mlx, qwen3_5")


def test_half_precision_rounds_and_no_more() -> None:
    """A model in bfloat16, which no operation of ours takes, keeps inputs of its own type."""
    loaded = prepare(*build("qwen3_5"), dtype="bfloat16")
    reply = contract.Reply("mlx, qwen3_5", 1)
    reply.expected = alone(lambda: MLXBackend(loaded, num_slots=2), reply.prompt, 24)
    steps = Steps(MLXBackend(loaded, num_slots=2, max_depth=MAX_DEPTH))
    contract.started(steps, reply)
    while len(reply.tokens) < 19:
        reply.settle(steps.run(decode=(reply.row(3),)))
    reply.check()
