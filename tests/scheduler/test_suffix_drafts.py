"""What followed the last tokens before is proposed: found whatever the text, at a bounded cost, and
never in what requests of another salt said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from builders import Client, check_idle, make_loop, make_prompt, oracle
from pippin.backends.fake import FakeBackend
from pippin.messages import Submit, pack_tokens
from pippin.scheduler.request import Request
from pippin.scheduler.suffix import (
    MAX_CANDIDATES,
    MAX_MATCH,
    MAX_SALTS,
    MAX_TOKENS,
    MIN_MATCH,
    SLICE,
    SuffixDrafter,
    TextIndex,
)
from pippin.types import SamplingParams

DEPTH = 4
both_modes = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])


def index_of(tokens: Sequence[int], slices: Sequence[int] = (1 << 20,)) -> TextIndex:
    text = TextIndex()
    text.extend(tokens)
    rng = random.Random(0)
    while text.num_unindexed:
        text.index(rng.choice(slices))
    return text


def longest(tokens: Sequence[int], tail: Sequence[int]) -> int:
    """Of a match of `tail` that something follows, by looking everywhere."""
    best = 0
    for end in range(len(tokens)):
        length = 0
        while length < min(end, len(tail)) and tokens[end - 1 - length] == tail[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= MIN_MATCH else 0


def propose(text: TextIndex, num_tokens: int) -> list[int]:
    match = text.find(text.tail())
    tokens = [] if match is None else text.continuation(match, num_tokens, repeats=True).tolist()
    return list(map(int, tokens))


# ---- what is found -------------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [(1,), (1, 2, 3, 50, 400), (1 << 20,)], ids=str)
def test_the_longest_match_is_found(slices: tuple[int, ...]) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        words = [[rng.randrange(1000) for _ in range(rng.randint(1, 40))] for _ in range(12)]
        tokens = [token for word in rng.choices(words, k=30) for token in word]
        text = index_of(tokens[: rng.randrange(len(tokens))], slices)
        tail = text.tail()
        match = text.find(tail)
        known = tokens[: len(text)]
        assert (0 if match is None else match.length) == longest(known, tail), seed
        if match is not None:
            followed = text.continuation(match, 5, repeats=False).tolist()
            assert followed == known[match.end : match.end + 5]
            before = known[: match.end][-match.length :]
            assert before == tail[len(tail) - match.length :]


def test_after_a_wrong_draft_the_next_longest_match_is_proposed() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 50, 51, 0, 3, 4, 5, 8, 60, 61, 0, 1, 2, 3, 4, 5]
    assert propose(index_of(tokens), 3) == [6, 50, 51]
    assert propose(index_of([*tokens, 8]), 2) == [60, 61]
    assert propose(index_of([*tokens, 9]), 2) == []


# ---- what it costs -------------------------------------------------------------------------------


class CountedReads(list[int]):
    reads = 0

    def __getitem__(self, key: Any) -> Any:
        self.reads += 1
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "tokens",
    [
        [5] * 100_000,
        [1, 2] * 50_000,
        [3, 3, 3, 4] * 25_000,
        [token for number in range(25_000) for token in (1, 2, 3, number)] + [1, 2, 3],
    ],
    ids=["one token", "two in turn", "almost one", "one place in many contexts"],
)
def test_a_search_reads_as_much_whatever_the_text(tokens: list[int]) -> None:
    text = index_of(tokens)
    tail = CountedReads(text.tail())
    text.find(tail)
    assert tail.reads <= MAX_CANDIDATES * MAX_MATCH + 1


def request_of(prompt: Sequence[int], name: str = "r", salt: bytes = b"") -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=100)
    submit = Submit(id=name, tokens=pack_tokens(prompt), params=params, stop_ids=[], salt=salt)
    return Request(submit, seed=0, arrival=0)


def test_a_step_indexes_a_bounded_slice_of_all_texts() -> None:
    drafter = SuffixDrafter(None)
    requests = [request_of(make_prompt(3000, number), str(number)) for number in range(8)]
    before, steps = 8 * 3000, 0
    while before > 8 * MIN_MATCH:
        drafter.prepare(requests)
        left = sum(text.num_unindexed for text in drafter._texts.values())
        assert before - left <= SLICE + 8 * MIN_MATCH
        assert left < before
        before, steps = left, steps + 1
    assert steps >= 8 * 3000 // SLICE


def test_memory_is_bounded() -> None:
    text = index_of(np.arange(100_000).tolist())
    assert text.nbytes <= 24 * len(text)
    drafter = SuffixDrafter(None)
    requests = [request_of(make_prompt(300, number), str(number)) for number in range(8)]
    drafter.prepare(requests)
    for request in requests:
        request.end("abort")
        drafter.forget(request)
    assert not drafter._texts
    for number in range(3 * MAX_SALTS):
        for _ in range(8):
            drafter._share(str(number).encode(), np.arange(MAX_TOKENS // 3, dtype=np.int32))
    assert len(drafter._shared) == MAX_SALTS
    assert all(len(text) <= MAX_TOKENS for text in drafter._shared.values())


# ---- whose text ----------------------------------------------------------------------------------


def make_client(*, overlap: bool = True, **kwargs: Any) -> Client:
    backend = FakeBackend(max_depth=DEPTH, num_slots=64)
    return Client(make_loop(backend=backend, overlap=overlap, suffix_depth=DEPTH, **kwargs))


def share_accepted(client: Client, prompt: Sequence[int], **kwargs: Any) -> tuple[int, float]:
    """How many drafts were accepted of a reply that is as it is without drafts."""
    metrics = client.loop.scheduler.metrics
    drafted, accepted = metrics.drafted_tokens, metrics.accepted_tokens
    reply = client.ask(prompt, max_tokens=60, **kwargs)
    assert reply.tokens == oracle(prompt, max_tokens=60)[0]
    drafted = metrics.drafted_tokens - drafted
    return drafted, (metrics.accepted_tokens - accepted) / max(1, drafted)


@both_modes
def test_a_prompt_that_was_answered_before_is_answered_from_the_tree(overlap: bool) -> None:
    client = make_client(overlap=overlap)
    share_accepted(client, make_prompt(90))
    client.loop.scheduler.speculation.drafter.flush()  # type: ignore[union-attr]
    drafted, share = share_accepted(client, make_prompt(90))
    assert drafted > 30
    assert share > 0.9
    check_idle(client)


@both_modes
def test_what_another_request_said_is_proposed_under_its_salt_alone(overlap: bool) -> None:
    """Neither from the tree nor from the texts of requests that ended."""
    for flush in (False, True):
        client = make_client(overlap=overlap)
        share_accepted(client, make_prompt(90), salt=b"theirs")
        if flush:
            client.loop.scheduler.traffic.flush()
        assert share_accepted(client, make_prompt(90), salt=b"mine")[0] < 10
        assert share_accepted(client, make_prompt(90))[0] < 10
        drafted, share = share_accepted(client, make_prompt(90), salt=b"theirs")
        assert drafted > 30
        assert share > 0.9


def test_a_flushed_cache_forgets_what_others_said() -> None:
    client = make_client()
    share_accepted(client, make_prompt(90))
    client.loop.flush_cache()
    assert share_accepted(client, make_prompt(90))[0] < 10


def test_without_a_cache_requests_share_nothing() -> None:
    client = make_client(cache=False)
    share_accepted(client, make_prompt(90))
    assert share_accepted(client, make_prompt(90))[0] < 10


def test_a_request_finds_its_own_text_and_proposes_beyond_what_is_in_flight() -> None:
    drafter = SuffixDrafter(None)
    ends = make_prompt(40, 1)
    request = request_of([*ends, *make_prompt(50, 2), 7, *ends])
    for number, token in enumerate(make_prompt(50, 2)[:20]):
        drafter.prepare([request])
        tokens, confidence = drafter.propose(request, 2 * DEPTH + 2)
        assert tokens.tolist() == make_prompt(50, 2)[number : number + 2 * DEPTH + 2]
        assert confidence == 3
        request.append(token)


def test_a_long_match_is_another_class_than_a_short_one() -> None:
    drafter = SuffixDrafter(None)
    classes = []
    for length in (3, 6, 10, 20):
        tail = list(range(100, 100 + length))
        request = request_of([1, *tail, 2, 3, 4, 5, *tail], str(length))
        drafter.prepare([request])
        classes.append(drafter.propose(request, 2)[1])
    assert classes == [0, 1, 2, 3]


def test_a_match_whose_places_disagree_is_doubtful() -> None:
    drafter = SuffixDrafter(None)
    tail = [10, 11, 12, 13, 14, 15]
    prompt = [token for number in range(50, 54) for token in (*tail, number)]
    request = request_of([*prompt, *tail])
    drafter.prepare([request])
    assert drafter.propose(request, 2)[1] == 0


# ---- what a client predicts ----------------------------------------------------------------------


@both_modes
def test_a_reply_that_is_predicted_is_accepted_from_its_first_token(overlap: bool) -> None:
    client = make_client(overlap=overlap, cache=False)
    prompt = make_prompt(40)
    expected = oracle(prompt, max_tokens=60)[0]
    steps = client.loop.scheduler.metrics.steps
    reply = client.ask(prompt, max_tokens=60, prediction=expected)
    assert reply.tokens == expected
    assert reply.accepted_drafts >= 60 * DEPTH // (DEPTH + 1) - DEPTH
    assert reply.rejected_drafts == 0
    assert client.loop.scheduler.metrics.steps - steps < 60 // DEPTH


@both_modes
def test_after_a_word_that_differs_the_rest_of_a_prediction_is_used(overlap: bool) -> None:
    client = make_client(overlap=overlap, cache=False)
    prompt = make_prompt(40)
    expected = oracle(prompt, max_tokens=60)[0]
    wrong = [*expected[:32], (expected[32] + 1) % 97, *expected[33:]]
    reply = client.ask(prompt, max_tokens=60, prediction=wrong)
    assert reply.tokens == expected
    assert reply.accepted_drafts > 35
    assert 0 < reply.rejected_drafts <= 4 * DEPTH


def test_predictions_of_others_are_not_proposed() -> None:
    client = make_client(cache=False)
    prompt = make_prompt(40)
    expected = oracle(prompt, max_tokens=60)[0]
    client.ask(prompt, max_tokens=60, prediction=expected)
    assert client.ask(prompt, max_tokens=60).accepted_drafts < 10


def test_a_queue_is_bounded_with_predictions() -> None:
    client = make_client(max_queue_tokens=100)
    replies = [client.submit(make_prompt(10, i), prediction=make_prompt(60)) for i in range(2)]
    assert [reply.error_status for reply in replies] == [0, 0]
    client.step()
    assert [reply.error_status for reply in replies] == [0, 503]
    client.run()
    assert client.ask(make_prompt(10), prediction=make_prompt(60)).error is None
