"""Rows that begin alike hold that beginning once, and nobody can tell from what they say.

Rows are given the same tokens whatever they would have said, so that their logits can be compared
to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from near_ties import TOLERANCE, log_softmax
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows import mains, memory
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.rows.mains import read_spans
from reference import assert_right, score
from serving import diverge, make_client, make_prompt, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("table")]

BLOCK = 8  # tokens of a tail in these tests: moves every few steps
START_LEN = 100
# Without windows, with them, with sinks, with layers that borrow others' KV.
MODELS = ("qwen3_5", "llama", "gemma3", "gpt_oss", "gemma4")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever can be shared, and move often."""
    monkeypatch.setattr(memory, "TAIL", BLOCK)
    monkeypatch.setattr(mains, "FEWEST_SHARED", BLOCK)
    monkeypatch.setattr(mains, "SETTLED_STEPS", 1)
    monkeypatch.setattr(mains, "MOST_IN_TABLE", 4)
    monkeypatch.setattr(mains, "SHARE_COST_TOKENS", 0)


@cache
def prompts_of(name: str) -> dict[int, list[int]]:
    """By slot: four that begin alike, one that leaves them half-way, one of its own."""
    start = make_prompt(name, START_LEN, seed=1)
    prompts = {
        s: diverge(name, start, START_LEN, n, seed=s) for s, n in enumerate((3, 9, 1, 14), 1)
    }
    prompts[5] = diverge(name, start, START_LEN // 2, 60, seed=5)
    prompts[6] = make_prompt(name, START_LEN + 5, seed=6)
    return prompts


@cache
def given_to(name: str, slot: int) -> list[int]:
    """What a row is given after its prompt, a token a step."""
    return make_prompt(name, 100, seed=50 + slot)


@dataclass
class Stage:
    """Decode rows of one model, stepped by hand."""

    name: str
    shares: bool
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by slot, of each step
    # Of each step: how many rows read how many tokens together.
    seen: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = served(self.name)
        self.attend_through(self.model.layout)

    def attend_through(self, layout: Layout) -> None:
        self.rows = DecodeRows(layout)
        self._forward = DecodeForward(layout, self.model.forward)

    def join(self, *slots: int) -> None:
        prompts = {slot: np.array(prompts_of(self.name)[slot], np.int32) for slot in slots}
        self.rows.join(
            [(s, self._prefilled(s, ids)) for s, ids in prompts.items()], self._known(prompts)
        )

    def leave(self, slot: int) -> None:
        self.rows.leave(slot)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            at, logits = self.rows.advance(list(self.rows.rows), self._next_tokens, self._forward)
            mx.eval(logits, self.rows.arrays())
            for slot, row in zip(at.tolist(), np.array(logits), strict=True):
                if slot:
                    self.logits[slot].append(row)
            self.seen.append(shared_spans(self.rows))

    def _known(self, prompts: Mapping[int, np.ndarray]) -> Mapping[int, np.ndarray] | None:
        return prompts if self.shares else None

    def _prefilled(self, slot: int, ids: np.ndarray) -> PromptState:
        state = PromptState()
        batch = ChunkBatch(self.model.layout, [ids], [state])
        logits = self.model.forward(batch.tokens, batch.caches)
        batch.advance()
        mx.eval(state.arrays())
        self.logits[slot] = [np.array(logits[0, -1])]
        return state

    def _next_tokens(self, slots: np.ndarray) -> mx.array:
        tokens = [given_to(self.name, s)[len(self.logits[s]) - 1] if s else 0 for s in slots]
        return mx.array(tokens, dtype=mx.int32)


def check_with_plain_model(stage: Stage) -> None:
    """Each row computed what plain mlx-lm computes of the same tokens."""
    for slot, logits in stage.logits.items():
        prompt, given = prompts_of(stage.name)[slot], given_to(stage.name, slot)
        expected = score(stage.name, (*prompt, *given[: len(logits) - 1]))[len(prompt) - 1 :]
        found = log_softmax(np.stack(logits))
        np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE, err_msg=f"slot {slot}")


def shared_spans(rows: DecodeRows) -> tuple[tuple[int, int], ...]:
    """Between the bounds of what some row begins with: how many rows, how many tokens."""
    spans = (span for own in rows.mains._classes for span in read_spans(own))
    return tuple(sorted((len(s.rows), s.num_columns) for s in spans if len(s.rows) > 1))


def main_nbytes(rows: DecodeRows) -> int:
    return sum(array.nbytes for array in rows.mains.arrays())


@cache
def play(name: str, *, shares: bool) -> Stage:
    """Rows join and leave, among them one that begins half alike and one that does not at all."""
    stage = Stage(name, shares)
    stage.join(1, 2, 3)
    stage.run(10)
    stage.join(4)
    stage.run(10)
    stage.leave(2)
    stage.join(5)
    stage.run(18)
    stage.join(6)
    stage.run(18)
    stage.leave(5)
    stage.leave(6)
    stage.run(2 * BLOCK)
    return stage


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("eager")
def test_rows_that_share_say_what_each_says_alone(name: str) -> None:
    stage = play(name, shares=True)
    check_with_plain_model(stage)
    half = START_LEN // 2
    whole = tuple((rows, START_LEN) for rows in (3, 4))
    assert {(one,) for one in whole} | {((3, half), (4, half))} == set(stage.seen)
    assert stage.seen[-1] == ((3, START_LEN),)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("eager")
def test_a_row_that_shared_is_captured_as_one_that_did_not(name: str) -> None:
    sharing, apart = play(name, shares=True), play(name, shares=False)
    assert set(apart.seen) == {()}
    for slot, logits in sharing.logits.items():
        pair = (log_softmax(np.stack(rows)) for rows in (logits, apart.logits[slot]))
        np.testing.assert_allclose(*pair, rtol=0, atol=TOLERANCE)
    for slot in sharing.rows.rows:
        kv, expected = sharing.rows.kv_of(slot), apart.rows.kv_of(slot)
        assert kv.keys() == expected.keys()
        for index in kv:
            window = sharing.model.layout.caches[index].window
            for mine, theirs in zip(kv[index], expected[index], strict=True):
                # What a window has passed by goes when rows are moved, which they are at times.
                kept = min(mine.shape[2], theirs.shape[2])
                assert kept >= window if window else mine.shape == theirs.shape
                last = mine[:, :, -kept:], theirs[:, :, -kept:]
                np.testing.assert_allclose(*last, rtol=0, atol=TOLERANCE)


@pytest.mark.usefixtures("eager")
def test_what_is_shared_is_held_once() -> None:
    sizes = {}
    for shares in (True, False):
        stage = Stage("llama", shares)
        stage.join(1, 2, 3)
        stage.run(BLOCK + 1)
        sizes[shares] = main_nbytes(stage.rows)
    leaf_bytes = sum(cache.nbytes for cache in served("llama").layout.caches)
    assert sizes[False] - sizes[True] == 2 * START_LEN * leaf_bytes


@pytest.mark.usefixtures("eager")
def test_what_is_shared_stays_where_it_is_when_tails_are_full() -> None:
    stage = Stage("llama", shares=True)
    stage.join(1, 2, 3)
    stage.run(1)
    first = stage.rows.mains._classes[0].segments[0]
    stage.run(BLOCK)
    (own,) = stage.rows.mains._classes
    assert all(own.pieces[row.index][0].segment is first for row in stage.rows.rows.values())


@pytest.mark.usefixtures("eager")
def test_windowed_layers_share_nothing() -> None:
    stage = play("gpt_oss", shares=True)
    shares = {
        own.window: any(len(span.rows) > 1 for span in read_spans(own))
        for own in stage.rows.mains._classes
    }
    assert {window is None: found for window, found in shares.items()} == {True: True, False: False}


@pytest.mark.usefixtures("eager")
def test_a_model_that_attends_in_its_own_way_shares_nothing() -> None:
    stage = Stage("llama", shares=True)
    stage.attend_through(stage.model.layout.reading(Reads.JOINED, instead_of=set(Reads)))
    stage.join(1, 2)
    stage.run(2 * BLOCK)
    assert set(stage.seen) == {()}
    check_with_plain_model(stage)


@pytest.mark.usefixtures("eager")
def test_the_engine_tells_rows_what_they_begin_with(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: set[tuple[tuple[int, int], ...]] = set()
    original = DecodeRows.advance

    def watched(rows: DecodeRows, *args: object) -> object:
        result = original(rows, *args)  # type: ignore[arg-type]
        shared.add(shared_spans(rows))
        return result

    monkeypatch.setattr(DecodeRows, "advance", watched)
    client = make_client("llama")
    replies = [client.submit(prompts_of("llama")[s], max_tokens=30) for s in (1, 2, 3)]
    client.run()
    assert ((3, START_LEN),) in shared
    for reply in replies:
        assert_right("llama", reply.prompt, reply.tokens)
