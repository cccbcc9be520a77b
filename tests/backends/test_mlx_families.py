"""Every family served by Pippin against plain mlx-lm: the same greedy tokens, alone and in a crowd.

The reference is a second, untouched instance of the model with mlx-lm's own caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from families import FAMILIES, VOCAB, build, prompt
from pippin.backends.base import Admit, DecodeRow, PrefillRow, Retire, StepPlan, StepResult
from pippin.backends.mlx.backend import MLXBackend
from pippin.backends.mlx.load import LoadedModel, prepare
from pippin.backends.mlx.rows import arrays, cohorts, grouping
from pippin.messages import Submit
from pippin.scheduler.loop import Loop
from pippin.scheduler.scheduler import Limits, Scheduler
from pippin.types import Component, SamplingParams, TokenLogprobs

CHUNK = 64
TOLERANCE = 1e-4  # of log probabilities, between two orders of the same float32 sums
CLEAR = 1e-4  # a greedy choice ahead by this much cannot fall to rounding


@dataclass(frozen=True)
class Case:
    prompt_len: int
    max_tokens: int
    joins_at: int = 0  # step of the loop before which it is submitted
    logprobs: int | None = None


SOLO = tuple(Case(n, 10) for n in (1, 63, 64, 65, 2 * CHUNK + 1))
# Sixteen of all lengths. The long replies cross a flush of the tail; most others are gone by
# then, so the rows are narrowed there, and those that join late widen them again.
CROWD = (
    Case(1, 24, logprobs=5),
    Case(63, 12),
    Case(64, 100, logprobs=5),
    Case(65, 20),
    Case(2 * CHUNK + 1, 16),
    Case(2, 67, 1),
    Case(3, 10, 2),
    Case(31, 1, 2),
    Case(32, 13, 3),
    Case(33, 9, 5),
    Case(100, 25, 5, logprobs=5),
    Case(127, 2, 8),
    Case(CHUNK * 2, 5, 13),
    Case(CHUNK * 3 + 1, 11, 20),
    Case(17, 12, 85, logprobs=5),
    Case(70, 8, 86),
)


@dataclass
class Reply:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None


@dataclass(frozen=True)
class Reference:
    tokens: list[int]
    logprobs: np.ndarray  # float32 [tokens, vocab]


@pytest.fixture(scope="module", autouse=True)
def no_compile() -> Iterator[None]:
    """On a Linux CPU `mx.compile` calls a C++ compiler, seconds for each kernel of each family."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@cache
def served(family: str) -> LoadedModel:
    return prepare(*build(family))


@cache
def reference(family: str) -> dict[int, Reference]:
    """By prompt length: as many greedy tokens as any case asks for."""
    model, _ = build(family)
    longest: dict[int, int] = {}
    for case in (*SOLO, *CROWD):
        longest[case.prompt_len] = max(case.max_tokens, longest.get(case.prompt_len, 0))
    return {n: greedy(model, prompt(n), max_tokens) for n, max_tokens in longest.items()}


def greedy(model: nn.Module, tokens: Sequence[int], max_tokens: int) -> Reference:
    """Plain mlx-lm, its own caches, a token at a time; one evaluation at the end."""
    caches = make_prompt_cache(model)
    inputs, rows = mx.array([tokens]), []
    for _ in range(max_tokens):
        logits = model(inputs, cache=caches)[:, -1]
        rows.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        inputs = mx.argmax(logits, axis=-1)[:, None]
    logprobs = np.array(mx.concatenate(rows))
    return Reference(logprobs.argmax(axis=1).tolist(), logprobs)


def serve(model: LoadedModel, cases: Sequence[Case], *, overlap: bool = True) -> list[Reply]:
    backend = MLXBackend(model, num_slots=16, debug=True)
    scheduler = Scheduler(backend.spec, Limits(max_running=16, prefill_tokens=CHUNK))
    loop = Loop(scheduler, backend, overlap=overlap)
    replies = [Reply() for _ in cases]
    waiting = sorted(range(len(cases)), key=lambda i: cases[i].joins_at)
    step = 0
    while waiting or not loop.idle:
        while waiting and cases[waiting[0]].joins_at <= step:
            number = waiting.pop(0)
            loop.submit(submit(number, cases[number]))
        for delta in loop.step():
            assert delta.error is None, delta.error
            reply = replies[int(delta.id)]
            reply.tokens += delta.tokens
            reply.logprobs += delta.logprobs or []
            reply.finish = delta.finish
        step += 1
    loop.close()
    return replies


def submit(number: int, case: Case) -> Submit:
    params = SamplingParams(
        max_tokens=case.max_tokens, temperature=0.0, ignore_eos=True, logprobs=case.logprobs
    )
    return Submit(str(number), prompt(case.prompt_len), params)


def check(reply: Reply, case: Case, expected: Reference) -> None:
    assert reply.tokens == expected.tokens[: case.max_tokens]
    assert reply.finish == "length"
    for place, logprobs in enumerate(reply.logprobs):
        row = expected.logprobs[place]
        ids = [reply.tokens[place], *logprobs.top_ids]
        values = [logprobs.logprob, *logprobs.top_logprobs]
        np.testing.assert_allclose(values, row[ids], atol=TOLERANCE)
        assert set(logprobs.top_ids) == set(np.argsort(row)[-len(logprobs.top_ids) :].tolist())
    assert len(reply.logprobs) == (0 if case.logprobs is None else case.max_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_lively_and_clear(family: str) -> None:
    """Else equal tokens would prove little, or would hang on rounding."""
    said = set()
    for answer in reference(family).values():
        best, second = np.sort(answer.logprobs, axis=1)[:, [-1, -2]].T
        assert (best - second).min() > CLEAR
        assert len(set(answer.tokens)) > len(answer.tokens) // 10
        said |= set(answer.tokens)
    assert len(said) > VOCAB // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_it_says_what_mlx_lm_says(family: str) -> None:
    for case in SOLO:
        (reply,) = serve(served(family), [case])
        check(reply, case, reference(family)[case.prompt_len])


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_ragged_crowd_everyone_says_what_mlx_lm_says(family: str) -> None:
    for reply, case in zip(serve(served(family), CROWD), CROWD, strict=True):
        check(reply, case, reference(family)[case.prompt_len])


SHAPES = ("qwen3_5", "gpt_oss", "falcon_h1", "deepseek_v3")  # one for each way to keep and attend


@pytest.mark.parametrize("family", SHAPES)
def test_many_flushes_into_many_groups_change_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short tails and cheap groups: rows of all lengths are regrouped every few steps."""
    monkeypatch.setattr(arrays, "TAIL", 8)
    monkeypatch.setattr(cohorts, "COLUMN_STEP", 8)
    monkeypatch.setattr(grouping, "GROUP_COST_TOKENS", 24)
    cases = CROWD[:-2]  # all but those that wait for the long ones
    for reply, case in zip(serve(served(family), cases), cases, strict=True):
        check(reply, case, reference(family)[case.prompt_len])


class Driver:
    """Plans made by hand: what the scheduler may ask for, though it seldom does."""

    def __init__(self, model: LoadedModel, prompt_lens: Sequence[int]) -> None:
        self.backend = MLXBackend(model, num_slots=len(prompt_lens), debug=True)
        self.prompts = {s: np.array(prompt(n), np.int32) for s, n in enumerate(prompt_lens, 1)}
        self.held = dict.fromkeys(self.prompts, 0)
        self.replies: dict[int, list[int]] = {slot: [] for slot in self.prompts}
        greedy_params = SamplingParams(temperature=0.0)
        admit = tuple(Admit(s, greedy_params, (), tokens, 0) for s, tokens in self.prompts.items())
        self.step = 0
        self._run(admit=admit)

    def prefill(self, *chunk_lens: int) -> None:
        chunks = []
        for slot, n in enumerate(chunk_lens, 1):
            start, end = self.held[slot], self.held[slot] + n
            tokens = self.prompts[slot]
            ends = end == len(tokens)
            chunks.append(PrefillRow(slot, start, tokens[start:end], samples=ends))
            self.held[slot] = end
        self._run(prefill=tuple(chunks))

    def decode(self, *slots: int) -> None:
        self._run(decode=tuple(DecodeRow(slot, self.held[slot]) for slot in slots))
        for slot in slots:
            self.held[slot] += 1

    def retire(self, slot: int) -> StepResult:
        return self._run(retire=(Retire(slot, 0, self.held[slot], captures=True),))

    def _run(self, **parts: tuple[object, ...]) -> StepResult:
        plan = StepPlan(self.step, **parts)  # type: ignore[arg-type]
        self.step += 1
        result = self.backend.launch(plan).wait()
        for slot, token in result.tokens.items():
            self.replies[slot].append(token)
        return result


@pytest.mark.parametrize("family", FAMILIES)
def test_uneven_chunks_share_forwards_and_rows_may_pause(family: str) -> None:
    lens = (70, 65, 64, 63)
    driver = Driver(served(family), lens)
    driver.prefill(30, 28, 31, 29)
    driver.prefill(34, 33, 30, 33)  # prefixes below, at and past the windows
    driver.prefill(6, 4, 3, 1)
    for slots in ((1, 2, 3, 4), (1, 3), (3, 4), (2, 4), (4,), (1, 2, 3, 4), (2, 1)):
        driver.decode(*slots)
    for slot, prompt_len in enumerate(lens, 1):
        reply = driver.replies[slot]
        assert reply == reference(family)[prompt_len].tokens[: len(reply)]
    assert [len(reply) for reply in driver.replies.values()] == [5, 5, 5, 6]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_retired_row_is_captured_once_and_whole(family: str) -> None:
    driver = Driver(served(family), (70,))
    driver.prefill(70)
    driver.decode(1)
    captures = driver.retire(1).captures
    components = driver.backend.spec.components
    assert [capture.start for capture in captures] == [0, *(c.end for c in captures[:-1])]
    assert captures[-1].end == 71
    assert [list(c.states) for c in captures if c.states] == [[71]] * (
        Component.STATE in components
    )
    for capture in captures:
        for payload in capture.kv.values():
            assert payload.num_tokens == capture.end - capture.start
    assert set(captures[-1].kv) == set(components) - {Component.STATE}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_are_those_of_one_plain_forward(family: str) -> None:
    """Teacher-forced: every position of a prompt computed in chunks, not only sampled ones."""
    tokens = prompt(2 * CHUNK + 1)
    backend = MLXBackend(served(family), num_slots=1)
    limits = Limits(max_running=1, prefill_tokens=CHUNK)
    loop = Loop(Scheduler(backend.spec, limits), backend)
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    loop.submit(Submit("0", tokens, params))
    deltas = []
    while not loop.idle:
        deltas += loop.step()
    found = [entry.logprob for entry in deltas[0].prompt_logprobs or []]
    model, _ = build(family)
    logits = model(mx.array([tokens]))[0]
    logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    expected = logprobs[range(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
