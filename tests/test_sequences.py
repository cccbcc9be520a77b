"""A request's sequences: what is submitted for them, and what becomes of the engine's deltas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pippin
from pippin.errors import ContextOverflow, OutOfMemory, PippinError
from pippin.messages import TokenDelta
from pippin.sequences import GeneratedSequence, SequencePiece, open_sequences, room_for_reply
from pippin.text.bundle import TextBundle
from pippin.text.pieces import joined
from pippin.text.prompt import Prompt, completion_prompt
from pippin.types import SamplingParams, TokenLogprobs

TEXT = TextBundle.load(Path(pippin.__file__).parent / "models" / "stories-hybrid-20m")
TOKENIZER = TEXT.tokenizer
EOS = TOKENIZER.eos_ids[0]
STORY = "Once upon a time, a 😀 met a dog. The end."
IDS = TOKENIZER.encode(STORY)
PROMPT = Prompt([5, 6, 7], boundaries=[2])


def open_one(prompt: Prompt = PROMPT, **params: Any) -> GeneratedSequence:
    (sequence,) = open_sequences("r", prompt, SamplingParams(**params), TOKENIZER)
    return sequence


def scores(tokens: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(token)) for token in tokens]


def feed(sequence: GeneratedSequence, tokens: list[int], size: int, **last: Any) -> SequencePiece:
    """All the pieces as one, from deltas of `size` tokens; the last delta has what `last` says."""
    pieces: list[SequencePiece] = []
    for start in range(0, len(tokens), size):
        part = tokens[start : start + size]
        more = last if start + size >= len(tokens) else {}
        pieces.append(sequence.take(TokenDelta("r-0", part, scores(part), **more)))
        if pieces[-1].finish is not None:
            break
    return SequencePiece(
        0,
        joined(part for piece in pieces for part in piece.pieces),
        [token for piece in pieces for token in piece.shown],
        [token for piece in pieces for token in piece.tokens],
        [known for piece in pieces for known in piece.logprobs],
        pieces[-1].finish,
    )


def test_each_sequence_has_its_own_id_index_and_seed() -> None:
    params = SamplingParams(n=3, seed=7, stop_token_ids=(EOS, 9), max_tokens=5)
    sequences = open_sequences("r", PROMPT, params, TOKENIZER, first_index=2)
    assert [s.index for s in sequences] == [2, 3, 4]
    submits = [s.submit for s in sequences]
    assert [submit.id for submit in submits] == ["r-2", "r-3", "r-4"]
    assert [(submit.params.seed, submit.params.n) for submit in submits] == [(7, 1), (8, 1), (9, 1)]
    assert all(submit.token_ids == [5, 6, 7] and submit.boundaries == [2] for submit in submits)
    assert submits[0].stop_ids == [*TOKENIZER.eos_ids, 9]


def test_without_a_seed_none_is_made_up_and_ignored_end_tokens_do_not_stop() -> None:
    submit = open_one(ignore_eos=True, stop_token_ids=(9,)).submit
    assert submit.params.seed is None
    assert submit.stop_ids == [9]


def test_the_room_for_a_reply_is_one_token_at_least() -> None:
    assert room_for_reply(PROMPT, 4, param="prompt") == 1
    with pytest.raises(ContextOverflow, match=r"length is 3 tokens.*3 in the prompt"):
        room_for_reply(PROMPT, 3, param="prompt")
    with pytest.raises(ContextOverflow, match=r"length is 2 tokens.*3 in the prompt") as info:
        room_for_reply(PROMPT, 2, param="messages")
    assert info.value.param == "messages"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_deltas_of_any_size_make_the_same_reply(size: int) -> None:
    piece = feed(open_one(logprobs=0), [*IDS, EOS], size, finish="stop")
    assert (piece.text, piece.finish) == (STORY, "stop")
    assert piece.tokens == [*IDS, EOS]
    assert piece.logprobs == scores([*IDS, EOS])
    assert [token.id for token in piece.shown] == IDS
    assert [token.logprobs for token in piece.shown] == scores(IDS)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_nothing_behind_a_stop_string_counts(size: int) -> None:
    sequence = open_one(stop=(" met",))
    piece = feed(sequence, [*IDS, EOS], size, finish="stop")
    assert (piece.text, piece.finish) == ("Once upon a time, a 😀", "stop")
    used = len(TOKENIZER.encode("Once upon a time, a 😀 met"))
    assert piece.tokens == IDS[:used]
    assert sequence.num_tokens == used


def test_the_first_delta_says_what_was_cached_and_scores_the_prompt() -> None:
    sequence = open_one()
    known = scores([6, 7])
    first = sequence.take(TokenDelta("r-0", [IDS[0]], prompt_logprobs=known, cached_tokens=2))
    second = sequence.take(TokenDelta("r-0", [IDS[1]]))
    assert (sequence.cached_tokens, sequence.prompt_logprobs) == (2, known)
    assert (first.is_first, second.is_first) == (True, False)


def test_an_echo_comes_first_and_offsets_count_it() -> None:
    prompt = completion_prompt("A small cat", TEXT, echo=True)
    sequence = open_one(prompt, logprobs=0, prompt_logprobs=0)
    delta = TokenDelta(
        "r-0", IDS, scores(IDS), scores(prompt.tokens[1:]), cached_tokens=0, finish="length"
    )
    piece = sequence.take(delta)
    assert piece.text == "A small cat" + STORY
    assert [token.id for token in piece.shown] == prompt.tokens + IDS
    assert piece.shown[0].logprobs is None
    assert piece.shown[len(prompt.tokens)].offset == len("A small cat")
    assert piece.tokens == IDS


def test_a_reply_that_nobody_wants_is_generated_but_not_told() -> None:
    sequence = open_one(max_tokens=0)
    assert sequence.submit.params.max_tokens == 1
    piece = sequence.take(TokenDelta("r-0", [EOS], finish="stop"))
    assert (piece.text, piece.tokens, piece.finish) == ("", [], "length")
    assert sequence.num_tokens == 0


def test_an_error_is_raised_as_what_it_was() -> None:
    error = TokenDelta(
        "r-0", finish="error", error="no bytes", error_code="out_of_memory", error_status=503
    )
    with pytest.raises(OutOfMemory, match="no bytes"):
        open_one().take(error)
    with pytest.raises(PippinError, match="aborted") as info:
        open_one().take(TokenDelta("r-0", finish="abort"))
    assert (info.value.code, info.value.status) == ("aborted", 503)
    with pytest.raises(PippinError) as info:
        open_one().take(TokenDelta("r-0", finish="error", error_code="new", error_status=418))
    assert (info.value.code, info.value.status) == ("new", 418)
