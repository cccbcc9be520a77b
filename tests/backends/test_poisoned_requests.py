"""What is not a number stays with the request it came from.

Nothing of one request is added to another's, but a masked column weighs zero, and zero times
infinity is not a number: whatever requests leave behind must be finite, or gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from builders import Client, Reply
from families import build
from near_ties import assert_same
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.rows import arrays, kv_table, mains
from pippin.types import SamplingParams
from serving import make_client, make_prompt, served

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
    monkeypatch.setattr(arrays, "TAIL", 24)
    monkeypatch.setattr(mains, "FEWEST_SHARED", 8)
    monkeypatch.setattr(kv_table, "SHARE_COST_TOKENS", 0)
    model = poisonous(name, value)
    spoiled = replies_to(make_client(name, model=model), name, POISON)
    clean = replies_to(make_client(name, model=model), name, HARMLESS)
    assert np.isfinite([scored.logprob for reply in spoiled for scored in reply.logprobs]).all()
    assert_same(spoiled, clean)


def admit(slot: int, tokens: Sequence[int], **params: float) -> Admit:
    sampling = SamplingParams(**({"temperature": 0.0} | params))  # type: ignore[arg-type]
    return Admit(slot, sampling, (), np.array(tokens, np.int32), seed=slot)


def chunk(slot: int, tokens: Sequence[int]) -> PrefillRow:
    return PrefillRow(slot, 0, np.array(tokens, np.int32), samples=True)


def poison(backend: MLXBackend, slot: int, value: float) -> None:
    """Everywhere that a row has been, and where nobody is."""
    rows = backend._decodes.shared_rows
    live = {row.index for row in rows.rows.values() if row.slot != slot}
    lines = [line for line in range(rows.width) if line not in live]
    per_row = rows._per_row
    flat = [side for pair in per_row.tails.values() for side in pair]
    flat += [entry for entries in per_row.states.values() for entry in entries]
    for array in flat:
        for line in lines:
            array[line] = value
    rows.mains._kv_table = None
    for own in rows.mains._classes:
        for segment in own.segments:
            free = np.ones(segment.capacity, bool)
            for index in live:
                for piece in own.pieces[index]:
                    if piece.segment is segment:
                        free[piece.start : piece.start + piece.num_columns] = False
            for side in (side for pair in segment.kv.values() for side in pair):
                side[:, mx.array(np.flatnonzero(free))] = value


def speak(name: str, value: float | None) -> dict[int, list[int]]:
    """Rows 1 to 3 speak; 2 is poisoned and leaves; 4 takes its place, 5 and 6 widen the rows."""
    backend = MLXBackend(served(name), num_slots=6)
    prompts = {slot: make_prompt(name, 20 + 9 * slot, seed=slot) for slot in range(1, 7)}
    said: dict[int, list[int]] = {slot: [] for slot in prompts}
    held = {slot: len(prompt) for slot, prompt in prompts.items()}
    number = 0

    def step(retire: tuple[int, ...] = (), start: tuple[int, ...] = (), decode: str = "") -> None:
        nonlocal number
        slots = [int(digit) for digit in decode]
        plan = StepPlan(
            number,
            retire=tuple(Retire(slot) for slot in retire),
            admit=tuple(admit(slot, prompts[slot]) for slot in start),
            prefill=tuple(chunk(slot, prompts[slot]) for slot in start),
            decode=tuple(DecodeRow(slot, held[slot]) for slot in slots),
        )
        number += 1
        for slot in slots:
            held[slot] += 1
        for slot, tokens in backend.launch(plan).wait().tokens.items():
            said[slot] += tokens

    step(start=(1, 2, 3))
    for _ in range(12):
        step(decode="123")
    if value is not None:
        poison(backend, 2, value)
    step(decode="123")
    step(retire=(2,), start=(4,), decode="13")
    for _ in range(4):
        step(decode="134")
    if value is not None:
        poison(backend, 0, value)
    step(start=(5, 6), decode="134")
    for _ in range(80):  # past a flush
        step(decode="13456")
    del said[2]
    return said


@pytest.mark.parametrize("name", MODELS)
def test_what_a_row_leaves_behind_spoils_nobody(name: str) -> None:
    expected = speak(name, None)
    assert speak(name, math.inf) == expected
    assert speak(name, math.nan) == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_is_not_a_number_shares_a_ragged_forward(name: str) -> None:
    """Prefixes of several lengths, chunks of several lengths, one of them poisoned."""
    lens = {1: (30, 11), 2: (25, 7), 3: (0, 9)}

    def first_tokens(value: float | None) -> dict[int, int]:
        backend = MLXBackend(served(name), num_slots=3)
        prompts = {
            s: np.array(make_prompt(name, a + b, seed=s), np.int32) for s, (a, b) in lens.items()
        }
        starts = tuple(admit(slot, tokens.tolist()) for slot, tokens in prompts.items())
        first = tuple(PrefillRow(s, 0, prompts[s][:a]) for s, (a, _) in lens.items() if a)
        backend.launch(StepPlan(0, admit=starts, prefill=first)).wait()
        if value is not None:
            for array in backend._prompts[2].arrays():
                array[:] = value
        second = tuple(PrefillRow(s, a, prompts[s][a:], samples=True) for s, (a, _) in lens.items())
        tokens = dict(backend.launch(StepPlan(1, prefill=second)).wait().tokens)
        del tokens[2]
        return tokens

    expected = first_tokens(None)
    assert first_tokens(math.inf) == first_tokens(math.nan) == expected
