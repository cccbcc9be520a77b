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
from pippin.backends.mlx.attention import split_attention
from pippin.backends.mlx.attention.paths import AttentionPaths, Path
from pippin.backends.mlx.gpu.attention_times import only_way
from pippin.backends.mlx.layout import Layout, Reads
from pippin.backends.mlx.prefill.batch import ChunkBatch, PromptState
from pippin.backends.mlx.rows import arrays, cohorts, grouping
from pippin.backends.mlx.rows.decode_forward import DecodeForward
from pippin.backends.mlx.rows.decode_rows import DecodeRows
from pippin.backends.mlx.rows.grouping import common_len, group_rows
from pippin.backends.mlx.trial_run import packed_rows
from reference import assert_right, score
from serving import diverge, make_client, make_prompt, served

pytestmark = pytest.mark.slow

BLOCK = 8  # tokens of a tail and of all else in these tests: a regrouping every few steps
START_LEN = 100
# Without windows, with them, with sinks, with latent KV, with layers that borrow others' KV.
MODELS = ("qwen3_5", "llama", "gemma3", "gpt_oss", "deepseek_v3", "gemma4")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share whatever can be shared, and regroup often."""
    monkeypatch.setattr(arrays, "TAIL", BLOCK)
    monkeypatch.setattr(cohorts, "COLUMN_STEP", BLOCK)
    for module in (grouping, split_attention):
        monkeypatch.setattr(module, "SHARED_BLOCK", BLOCK)
    monkeypatch.setattr(grouping, "SHARE_COST_TOKENS", 0)
    monkeypatch.setattr(grouping, "SPLIT_COST_TOKENS", 0)
    monkeypatch.setattr(grouping, "DEPTHS", (4 * BLOCK,))


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
    paths: AttentionPaths | None = None
    logits: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by slot, of each step
    seen: list[tuple[int, ...]] = field(default_factory=list)  # tokens shared, by cohort and step

    def __post_init__(self) -> None:
        self.model = served(self.name)
        self.attend_through(self.model.layout)

    def attend_through(self, layout: Layout) -> None:
        self.rows = DecodeRows(layout, self.paths)
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
            self.seen.append(tuple(sorted(num_shared(self.rows))))

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


def num_shared(rows: DecodeRows) -> list[int]:
    """Of each cohort that shares."""
    sizes = [{int(keys.shape[2]) for keys, _ in c.shared.values()} for c in rows.mains.cohorts]
    return [size for (size,) in filter(None, sizes)]


def main_nbytes(rows: DecodeRows) -> int:
    return sum(array.nbytes for cohort in rows.mains.cohorts for array in cohort.arrays())


@cache
def play(name: str, way: str, *, shares: bool, paths: AttentionPaths | None = None) -> Stage:
    """Rows join and leave, so that the shared beginning comes, shrinks, goes and comes again."""
    stage = Stage(name, shares, paths)
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
def test_rows_that_share_say_what_each_says_alone(name: str, way: str) -> None:
    stage = play(name, way, shares=True)
    check_with_plain_model(stage)
    whole = START_LEN - START_LEN % BLOCK
    half = START_LEN // 2 - START_LEN // 2 % BLOCK
    assert {(), (whole,), (half,)} <= set(stage.seen), "it came, shrank, and went"
    assert stage.seen[-1] == (whole,)


@pytest.mark.usefixtures("eager", "without_table")
def test_what_is_shared_is_not_joined_however_fast_that_is() -> None:
    model = served(MODELS[0])
    _, calls = packed_rows(model.layout, model.forward)
    joined = AttentionPaths(times=dict.fromkeys(calls, only_way(Path.JOINED)))
    stage = play(MODELS[0], "without_table", shares=True, paths=joined)
    check_with_plain_model(stage)
    assert stage.seen[-1], "nothing was shared"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("eager")
def test_a_row_that_shared_is_captured_as_one_that_did_not(name: str, way: str) -> None:
    sharing, apart = play(name, way, shares=True), play(name, way, shares=False)
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
    whole = START_LEN - START_LEN % BLOCK
    assert sizes[False] - sizes[True] == 2 * whole * leaf_bytes


@pytest.mark.usefixtures("eager")
def test_the_shared_arrays_stay_where_they_are_when_tails_are_flushed() -> None:
    stage = Stage("llama", shares=True)
    stage.join(1, 2, 3)
    stage.run(BLOCK + 1)
    (before,) = stage.rows.mains.cohorts
    shared = dict(before.shared)
    stage.run(BLOCK)
    (after,) = stage.rows.mains.cohorts
    assert after is not before
    assert shared.keys() == after.shared.keys() != set()
    assert all(after.shared[cache][0] is keys for cache, (keys, _) in shared.items())


@pytest.mark.usefixtures("eager")
def test_rows_that_begin_differently_share_nothing() -> None:
    stage = Stage("llama", shares=True)
    stage.join(1, 6)
    stage.run(2 * BLOCK)
    assert len(stage.rows.mains.cohorts) == 1
    assert set(stage.seen) == {()}


@pytest.mark.usefixtures("eager")
def test_windowed_layers_share_nothing() -> None:
    stage = play("gpt_oss", "table", shares=True)
    caches = served("gpt_oss").layout.caches
    (cohort,) = stage.rows.mains.cohorts
    assert {caches[cache].window for cache in cohort.shared} == {None}
    assert {caches[cache].window for cache in cohort.kv} > {None}


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
    shared: set[int] = set()
    original = DecodeRows.advance

    def watched(rows: DecodeRows, *args: object) -> object:
        result = original(rows, *args)  # type: ignore[arg-type]
        shared.update(num_shared(rows))
        return result

    monkeypatch.setattr(DecodeRows, "advance", watched)
    client = make_client("llama")
    replies = [client.submit(prompts_of("llama")[s], max_tokens=30) for s in (1, 2, 3)]
    client.run()
    assert shared == {START_LEN - START_LEN % BLOCK}
    for reply in replies:
        assert_right("llama", reply.prompt, reply.tokens)


# ---- which rows share ------------------------------------------------------------------------


def prompt_after(start: np.ndarray, num_tokens: int, seed: int) -> np.ndarray:
    return np.concatenate([start, np.full(num_tokens, -seed, np.int32)])


def test_the_common_beginning_is_what_a_plain_loop_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        some = [rng.integers(0, 2, rng.integers(0, 6)) for _ in range(rng.integers(1, 5))]
        expected = 0
        for column in zip(*some, strict=False):
            if len(set(column)) > 1:
                break
            expected += 1
        assert common_len(some) == expected


def test_a_beginning_is_shared_in_whole_blocks_when_it_saves_enough() -> None:
    start = np.arange(1000, dtype=np.int32)
    prompts = {index: prompt_after(start, 5, seed=index) for index in range(1, 9)}
    (group,) = group_rows(dict.fromkeys(prompts, 1010), prompts)
    assert group.indices == list(prompts)
    assert group.num_shared == 1000 // 64 * 64
    saves_little = {index: prompt[900:] for index, prompt in list(prompts.items())[:2]}
    (group,) = group_rows(dict.fromkeys(saves_little, 110), saves_little)
    assert group.num_shared == 0


def test_a_row_keeps_a_column_of_its_own() -> None:
    prompt = np.arange(64 * 32, dtype=np.int32)
    lengths = {index: len(prompt) for index in range(8)}
    (group,) = group_rows(lengths, dict.fromkeys(lengths, prompt))
    assert group.num_shared == len(prompt) - 64


def test_a_stranger_does_not_keep_others_from_sharing() -> None:
    start = np.arange(4000, dtype=np.int32)
    prompts = {index: prompt_after(start, 5, seed=index) for index in range(1, 9)}
    prompts[9] = start[::-1].copy()
    groups = group_rows(dict.fromkeys(prompts, 4010), prompts)
    assert sorted((group.indices, group.num_shared) for group in groups) == [
        (list(range(1, 9)), 3968),
        ([9], 0),
    ]


def test_a_small_family_is_not_worth_a_group_of_its_own() -> None:
    start = np.arange(300, dtype=np.int32)
    prompts = {index: prompt_after(start, 5, seed=index) for index in (1, 2)}
    prompts[3] = start[::-1].copy()
    (group,) = group_rows(dict.fromkeys(prompts, 305), prompts)
    assert (group.indices, group.num_shared) == ([1, 2, 3], 0)


def test_rows_whose_prompt_is_not_known_share_nothing() -> None:
    prompts = dict.fromkeys(range(8), np.arange(4000, dtype=np.int32))
    groups = group_rows(dict.fromkeys(range(9), 4010), prompts)
    assert [(group.indices, group.num_shared) for group in groups] == [
        (list(range(8)), 3968),
        ([8], 0),
    ]
    (group,) = group_rows(dict.fromkeys(range(9), 4010), {})
    assert group.num_shared == 0
