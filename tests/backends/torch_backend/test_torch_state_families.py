"""Families against transformers on the checkpoints that it wrote.

Transformers judges what was said, given what was said before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'pippin[torch]'")

import numpy as np

from builders import Client, Reply
from near_ties import TOLERANCE, assert_best
from oracle_drafter import OracleDrafter
from pippin.backends.torch.config import FAMILIES, read_shape
from pippin.errors import LoadError
from pippin.scheduler import admission, memory
from pippin.scheduler.request import Request
from pippin.scheduler.speculation import Speculation
from serving import TORCH, check_idle, make_client, make_prompt, spec_of
from transformers_families import STATE_CONFIGS, WRITTEN_CONFIGS, score


def ask(
    client: Client, prompts: list[list[int]], max_tokens: int = 6, logprobs: int | None = 3
) -> list[Reply]:
    replies = [client.submit(p, max_tokens=max_tokens, logprobs=logprobs) for p in prompts]
    client.run()
    check_idle(client)
    return replies


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", WRITTEN_CONFIGS)
def test_cold_joined_warm_and_preempted_replies_are_what_transformers_says(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{TORCH}{family}"
    for module in (admission, memory):
        monkeypatch.setattr(module, "GROWTH_TOKENS", 4)
    client = make_client(name, chunk=64, num_slots=4)
    short, long = make_prompt(name, 30, seed=0), make_prompt(name, 150, seed=1)
    replies = ask(client, [short])
    replies += ask(client, [long, make_prompt(name, 61, seed=2), make_prompt(name, 5, seed=3)])
    turn = [*short, *replies[0].tokens, *make_prompt(name, 2, seed=4)]
    warm = ask(client, [[*long[:130], *make_prompt(name, 3, seed=5)], turn, long])
    assert all(reply.cached_tokens for reply in warm)
    pressed = make_client(name, capacity_bytes=3 * client.loop.backend.row_bytes(64))
    prompts = [make_prompt(name, 50 + number, seed=number) for number in range(6)]
    preempted = ask(pressed, prompts, max_tokens=14)
    assert pressed.loop.scheduler.metrics.preemptions > 0
    check_scores(family, [*replies, *warm, *preempted])


def check_scores(family: str, replies: list[Reply]) -> None:
    rows = score(family, [[*reply.prompt, *reply.tokens[:-1]] for reply in replies])
    for reply, scored_by_it in zip(replies, rows, strict=True):
        behind = scored_by_it[len(reply.prompt) - 1 :]
        assert_best(reply.tokens, behind)
        for scored, row in zip(reply.logprobs or (), behind, strict=bool(reply.logprobs)):
            expected = row[list(scored.top_ids)]
            np.testing.assert_allclose(scored.top_logprobs, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers' own
@pytest.mark.parametrize("family", ["lfm2", "nemotron_h", "deepseek_v3"])
def test_replies_with_drafts_are_what_transformers_says(family: str) -> None:
    name, depth = f"{TORCH}{family}", 3
    prompts = [make_prompt(name, num_tokens, seed=num_tokens) for num_tokens in (5, 70)]
    expected = ask(make_client(name), prompts, max_tokens=16)
    known = {tuple(reply.prompt): reply.tokens for reply in expected}

    def reply_of(request: Request) -> Sequence[int]:
        return known[tuple(request.prompt.tolist())]

    drafter = OracleDrafter(reply_of, 0.7, spec_of(name).vocab_size)
    client = make_client(name, speculation=Speculation(drafter, depth, lambda _: depth))
    replies = ask(client, prompts, max_tokens=16, logprobs=None)  # with them there are no drafts
    metrics = client.loop.scheduler.metrics
    assert 0 < metrics.accepted_tokens < metrics.drafted_tokens
    warm = ask(client, [[*reply.prompt, *reply.tokens] for reply in replies])
    assert all(reply.cached_tokens for reply in warm)
    check_scores(family, [*replies, *warm])


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("lfm2", {"layer_types": ["conv", "sliding_attention"]}, "sliding_attention"),
        ("nemotron_h", {"hybrid_override_pattern": "M?"}, "blocks ?"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "silu"),
        ("nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "gelu"),
        ("granitemoehybrid", {"layer_types": ["mamba", "window"]}, "window"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"rope_scaling": {"type": "dynamic"}}, "dynamic"),
    ],
)
def test_what_a_family_may_have_and_is_not_served_is_refused_by_name(
    family: str, changed: dict[str, object], named: str
) -> None:
    with pytest.raises(LoadError, match=re.escape(named)):
        read_shape(STATE_CONFIGS[family] | changed)


def test_families_that_transformers_writes_are_listed() -> None:
    assert {str(config["model_type"]) for config in WRITTEN_CONFIGS.values()} <= set(FAMILIES)
