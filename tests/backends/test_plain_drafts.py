"""Drafts on devices without operations of ours, in plain operations.

The same tokens as without drafts; the contract's own tests run here as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from test_mlx_drafts import Speculated
from test_speculated_replies import prompts_of, replies_of

import test_draft_contract as contract
from families import build
from near_ties import count_same
from oracle_drafter import OracleDrafter
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.cpu.operations.bindings import without_operations
from pippin.backends.mlx.load import prepare
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from serving import BUNDLED, make_client, spec_of
from test_contract import Steps, alone, make_tokens

MAX_DEPTH = 4


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    with without_operations():
        yield


def any_depth() -> Speculation:
    depths = count()
    return Speculation(
        None,
        MAX_DEPTH,
        lambda _: next(depths) % (MAX_DEPTH + 1),
        device=DeviceDrafter("mtp", MAX_DEPTH),
    )


@pytest.mark.parametrize(
    ("name", "overlap"), [("qwen3_5", False), ("qwen3_5", True), ("llama", True), ("gpt_oss", True)]
)
def test_replies_are_those_without_drafts_cold_and_warm(name: str, overlap: bool) -> None:
    """A hybrid, attention alone, and windows with experts: greedy and sampled, joining each other,
    past moves of tails into mains."""
    prompts = prompts_of(name)[:3]
    expected = replies_of(make_client(name, overlap=overlap), prompts)
    known = {tuple(prompt): reply for prompt, reply in zip(prompts, expected, strict=True)}

    def reply_of(request: Request) -> Sequence[int]:
        return known[tuple(request.prompt.tolist())]

    drafter, depths = OracleDrafter(reply_of, 0.7, spec_of(name).vocab_size), count()
    chosen = Speculation(drafter, MAX_DEPTH, lambda _: next(depths) % (MAX_DEPTH + 1))
    client = make_client(name, overlap=overlap, speculation=chosen)
    assert replies_of(client, prompts) == expected
    assert replies_of(client, prompts) == expected
    assert client.loop.scheduler.metrics.accepted_tokens > 40


def test_replies_are_those_without_drafts_by_the_models_own_head() -> None:
    prompts = prompts_of(BUNDLED)[:2]
    expected = replies_of(make_client(BUNDLED), prompts)
    client = make_client(BUNDLED, speculation=any_depth())
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

    def make(max_depth: int = MAX_DEPTH) -> MLXBackend:
        return MLXBackend(loaded, num_slots=2, max_depth=max_depth)

    prompt = make_tokens(20)
    expected = alone(lambda: make(0), prompt, 24)
    reply = Speculated(Steps(make()), 1, prompt, expected.tokens)
    reply.start()
    said = reply.finish(3, overlap=True)
    assert count_same(said, expected) > 0
    assert reply.num_steps < 20
