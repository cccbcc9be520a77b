"""A draft model on mlx: one that is the model itself is always right, no other changes a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import save_config, save_model
from test_speculated_replies import prompts_of

from builders import Client
from bundled import BUNDLED_PATH
from families import build
from pippin.backends.base import PrefillRow
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.drafts.rings import RingLayer, RingShape
from pippin.errors import LoadError
from pippin.scheduler.speculation import DeviceDrafter, Speculation
from serving import DRAFTED_BY, make_backend, make_client
from test_contract import Steps, admit, restore
from test_draft_contract import MAX_DEPTH, MLX_OWN_DRAFTS, NUM_SLOTS, Reply

OWN = MLX_OWN_DRAFTS.removeprefix("mlx, ")
SAMPLED = {"temperature": 1.0, "seed": 5}


def make_steps() -> Steps:
    return Steps(make_backend(OWN, NUM_SLOTS, max_depth=MAX_DEPTH))


def assert_all_are_right(steps: Steps, reply: Reply, wanted: tuple[int, ...]) -> None:
    """`wanted`: drafts that each of the next steps leaves."""
    for num_drafts in wanted:
        row = reply.own_row(num_drafts)
        assert reply.settle(steps.run(decode=(row,))) == row.depth
    reply.check()


@pytest.mark.parametrize("params", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_model_itself_is_always_right(params: dict[str, Any]) -> None:
    """Behind a prompt in two chunks, and behind steps without drafts that it has not read."""
    steps, reply = make_steps(), Reply(MLX_OWN_DRAFTS, 2, params=params)
    who = admit(2, reply.prompt, **params)
    steps.run(admit=(who,), prefill=(PrefillRow(2, 0, reply.prompt[:7]),))
    chunk = PrefillRow(2, 7, reply.prompt[7:], samples=True, num_drafts=3)
    reply.depths.append(0)
    reply.num_left = 3
    reply.settle(steps.run(prefill=(chunk,)))
    assert_all_are_right(steps, reply, (4, 0, 0, 0, 0, 2, 1, 0, 0, 3, 4, 0))


@pytest.mark.parametrize("num_restored", [13, 20], ids=["a part", "whole"])
def test_a_restored_prompt_is_read(num_restored: int) -> None:
    steps, reply = make_steps(), Reply(MLX_OWN_DRAFTS, 2)
    prompt = reply.prompt
    first = PrefillRow(1, 0, prompt[:num_restored], captures=True, samples=num_restored == 20)
    captures = steps.run(admit=(admit(1, prompt),), prefill=(first,)).captures
    rest = PrefillRow(
        2,
        num_restored,
        prompt[num_restored:],
        samples=True,
        restore=restore(captures, num_restored),
        num_drafts=4,
    )
    reply.depths.append(0)
    reply.num_left = 4
    reply.settle(steps.run(admit=(admit(2, prompt),), prefill=(rest,)))
    assert_all_are_right(steps, reply, (4, 2, 0, 3, 0))


def test_a_ring_shows_the_first_tokens_and_the_last_ones() -> None:
    """Whatever drafts were rejected on the way: of 14 cells, 3 may hold such."""
    layer = RingLayer((1, 4), (1, 4), mx.float32)
    shape = RingShape((layer,), 14, num_first=2, num_wrong=3)
    cells = np.full(15, -1)
    for place in range(60):
        here = mx.array([[place]])
        cells[shape.cells(here).item()] = place
        seen = np.array(shape.visible(here, here, None))[0, 0]
        wanted = [n for n in range(place + 1) if n < 2 or place - n < 14 - 2 - 3]
        assert sorted(cells[seen].tolist()) == wanted
        near = np.array(shape.visible(here, here, 4))[0, 0]
        assert sorted(cells[near].tolist()) == [n for n in wanted if place - n < 4]
        for behind in range(1, 1 + place % 4):  # drafts that are rejected
            cells[shape.cells(mx.array(place + behind)).item()] = 1000


def speculation(depth_of: Callable[[int], int]) -> Speculation:
    """`depth_of`: the number of a choice."""
    numbers, device = count(), DeviceDrafter("draft", MAX_DEPTH)
    return Speculation(None, MAX_DEPTH, lambda _: depth_of(next(numbers)), device=device)


def make_replies(client: Client, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Each starts while others run; every second one is sampled."""
    replies = []
    for number, prompt in enumerate(prompts):
        params = {"temperature": 1.0, "seed": number} if number % 2 else {}
        replies.append(client.submit(prompt, max_tokens=17 + 4 * number, **params))
        client.step(3)
    client.run()
    return [reply.tokens for reply in replies]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_replies_are_those_without_drafts_cold_and_warm(overlap: bool) -> None:
    """With windows, sinks and experts, at every depth, and restored from what was captured."""
    name = f"gpt_oss{DRAFTED_BY}gpt_oss"
    prompts = prompts_of("gpt_oss")[:3]
    expected = make_replies(make_client("gpt_oss", overlap=overlap), prompts)
    chosen = speculation(lambda number: number % (MAX_DEPTH + 1))
    client = make_client(name, overlap=overlap, speculation=chosen)
    assert make_replies(client, prompts) == expected
    assert make_replies(client, prompts) == expected
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 60
    assert metrics.accepted_tokens > 0.97 * metrics.drafted_tokens


def test_replies_are_those_without_another_models_drafts() -> None:
    prompts = prompts_of("qwen3_5")[:2]
    expected = make_replies(make_client("qwen3_5"), prompts)
    client = make_client(f"qwen3_5{DRAFTED_BY}llama", speculation=speculation(lambda _: 3))
    assert make_replies(client, prompts) == expected
    metrics = client.loop.scheduler.metrics
    assert metrics.drafted_tokens > 60
    assert metrics.accepted_tokens < 0.3 * metrics.drafted_tokens


def test_what_it_remembers_is_in_the_budget() -> None:
    without = make_backend("llama", NUM_SLOTS, max_depth=MAX_DEPTH)
    backend = make_backend(OWN, NUM_SLOTS, max_depth=MAX_DEPTH)
    layers = backend.loaded.layout.caches
    kept = 2 * 513 * sum(layer.nbytes for layer in layers)  # one is read, one is written
    assert backend.row_bytes(100) - without.row_bytes(100) == kept


def test_a_draft_model_with_recurrent_states_is_refused() -> None:
    with pytest.raises(LoadError, match=r"draft_model: .* has recurrent states"):
        MLXBackend.load(BUNDLED_PATH, num_slots=1, max_depth=2, draft=BUNDLED_PATH)


def test_it_is_loaded_where_drafts_are_wanted_alone(tmp_path: Path) -> None:
    model, config = build("llama")
    save_model(tmp_path, model)
    save_config(config, tmp_path / "config.json")

    def drafts_itself(**kwargs: Any) -> int:
        return MLXBackend.load(tmp_path, num_slots=2, draft=tmp_path, **kwargs).drafts_itself

    assert drafts_itself(max_depth=3) == 3
    assert drafts_itself() == drafts_itself(max_depth=3, deterministic=True) == 0
