"""A draft model that is the model itself is always right on either backend; mlx's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import save_config, save_model

from bundled import BUNDLED_PATH
from families import build
from pippin.backends.base import PrefillRow
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.drafts.rings import RingLayer, RingShape
from pippin.errors import LoadError
from serving import make_backend
from test_contract import Steps, admit, restore
from test_draft_contract import (
    BACKENDS,
    MAX_DEPTH,
    MLX_OWN_DRAFTS,
    NUM_SLOTS,
    OWN_DRAFTS,
    SAMPLED,
    Reply,
)

OWN = MLX_OWN_DRAFTS.removeprefix("mlx, ")
every_own = pytest.mark.parametrize(
    "own", [name for name in BACKENDS if name in (MLX_OWN_DRAFTS, f"torch, {OWN_DRAFTS}")]
)


def assert_all_are_right(steps: Steps, reply: Reply, wanted: tuple[int, ...]) -> None:
    """`wanted`: drafts that each of the next steps leaves."""
    for num_drafts in wanted:
        row = reply.own_row(num_drafts)
        assert reply.settle(steps.run(decode=(row,))) == row.depth
    reply.check()


@every_own
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_the_model_itself_is_always_right(way: str, own: str) -> None:
    """Behind a prompt in two chunks, and behind steps without drafts that it has not read."""
    params = SAMPLED[way]
    steps, reply = Steps(BACKENDS[own]()), Reply(own, 2, params=params)
    who = admit(2, reply.prompt, **params)
    steps.run(admit=(who,), prefill=(PrefillRow(2, 0, reply.prompt[:7]),))
    go_on(steps, reply, 3, prefill=(PrefillRow(2, 7, reply.prompt[7:], True, num_drafts=3),))
    assert_all_are_right(steps, reply, (4, 0, 0, 0, 0, 2, 1, 0, 0, 3, 4, 0))


@every_own
def test_a_prompt_whose_reply_starts_without_drafts_is_read_later(own: str) -> None:
    steps, reply = Steps(BACKENDS[own]()), Reply(own, 1)
    reply.settle(steps.run(**reply.start()))
    assert_all_are_right(steps, reply, (0, 0, 3, 4, 4, 0))


def go_on(steps: Steps, reply: Reply, num_drafts: int, **plan: Any) -> None:
    reply.depths.append(0)
    reply.num_left = num_drafts
    reply.settle(steps.run(**plan))


@every_own
@pytest.mark.parametrize("num_restored", [13, 20], ids=["a part", "whole"])
def test_a_restored_prompt_is_read(num_restored: int, own: str) -> None:
    steps, reply = Steps(BACKENDS[own]()), Reply(own, 2)
    prompt, n = reply.prompt, num_restored
    first = PrefillRow(1, 0, prompt[:n], captures=True, samples=n == 20)
    captures = steps.run(admit=(admit(1, prompt),), prefill=(first,)).captures
    held = restore(captures, n)
    rest = PrefillRow(2, n, prompt[n:], samples=True, restore=held, num_drafts=4)
    go_on(steps, reply, 4, admit=(admit(2, prompt),), prefill=(rest,))
    assert_all_are_right(steps, reply, (4, 2, 0, 3, 0))


@every_own
def test_a_resumed_reply_is_read(own: str) -> None:
    steps, reply = Steps(BACKENDS[own]()), Reply(own, 2)
    said = np.array(reply.expected.tokens[:6], dtype=np.int32)
    known = np.concatenate([reply.prompt, said])
    reply.tokens += said.tolist()
    reply.bound = len(known)
    row = PrefillRow(2, 0, known, samples=True, num_drafts=4)
    go_on(steps, reply, 4, admit=(admit(2, reply.prompt, reply=said),), prefill=(row,))
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
