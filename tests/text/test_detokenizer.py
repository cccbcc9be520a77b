"""The incremental detokenizer against decoding everything at once."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from bundled import BUNDLED_PATH
from pippin.text.detokenizer import Decoded, Detokenizer, StopMatcher
from pippin.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(BUNDLED_PATH)
TEXTS = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("ab 😀👩‍👩‍👧é漢")), max_size=40
)


def sentencepiece_tokenizer(*decoder_steps: object) -> Tokenizer:
    """Words with a visible space, and bytes for everything else, as Llama 2 and Gemma have."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "b", "▁", "▁▁c"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *decoder_steps]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)


def wordpiece_tokenizer() -> Tokenizer:
    pieces = ["the", "cat", "##s", "run", "##ning", ".", "a"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


def stream(tokenizer: Tokenizer, ids: list[int], *stop: str) -> list[Decoded]:
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.feed([token]))
        if detokenizer.stopped:
            return pieces
    return [*pieces, detokenizer.close()]


def text_of(pieces: list[Decoded]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60))
def test_any_tokens_stream_to_the_text_they_decode_to(ids: list[int]) -> None:
    assert text_of(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids)


@given(TEXTS)
def test_any_text_comes_back_and_no_piece_of_it_is_a_broken_character(text: str) -> None:
    pieces = stream(TOKENIZER, TOKENIZER.encode(text))
    assert text_of(pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.text("ae t", min_size=1))
def test_every_token_before_a_stop_is_reported_once_with_its_span(ids: list[int], s: str) -> None:
    pieces = stream(TOKENIZER, ids, s)
    text, spans = text_of(pieces), [span for piece in pieces for span in piece.spans]
    assert [span.index for span in spans] == list(range(len(spans)))
    assert [span.id for span in spans] == ids[: len(spans)]
    assert all(span.start <= span.end for span in spans)
    whole = TOKENIZER.decode(ids)
    assert text == whole.partition(s)[0]
    if s not in whole:
        assert len(spans) == len(ids)


def test_the_tokens_of_one_character_all_span_it_and_appear_with_it() -> None:
    ids = TOKENIZER.encode("a😀")
    assert len(ids) > 2, "the emoji must be split for this test to mean anything"
    pieces = stream(TOKENIZER, ids)
    emoji = [span for piece in pieces for span in piece.spans][1:]
    assert {(span.start, span.end) for span in emoji} == {(1, 2)}
    assert [len(piece.spans) for piece in pieces[1:-1]] == [0] * (len(ids) - 2) + [len(ids) - 1]


def test_special_tokens_are_not_shown_but_thinking_marks_are() -> None:
    think, end = TOKENIZER.encode("<think></think>")
    im_end = TOKENIZER.eos_ids[0]
    assert text_of(stream(TOKENIZER, [think, end, im_end])) == "<think></think>"


def test_a_character_left_unfinished_shows_as_a_replacement_when_the_reply_ends() -> None:
    ids = TOKENIZER.encode("😀")[:-1]
    *pieces, last = stream(TOKENIZER, ids)
    assert text_of(pieces) == ""
    assert (last.text, len(last.spans)) == ("\ufffd", len(ids))


@pytest.mark.parametrize("strip", [[], [decoders.Strip(" ", 1, 0)]])
@given(text=st.text("ab c漢😀", max_size=12))
def test_sentencepiece_text_streams_and_keeps_the_space_that_continues_the_prompt(
    strip: list[object], text: str
) -> None:
    tokenizer = sentencepiece_tokenizer(*strip)
    ids = tokenizer.encode(text.replace(" ", "▁"))
    assert text_of(stream(tokenizer, ids)) == text


def test_a_byte_token_that_is_no_text_does_not_spoil_its_neighbours() -> None:
    tokenizer = sentencepiece_tokenizer()
    smile = [1 + byte for byte in "😀".encode()]
    assert text_of(stream(tokenizer, [*smile, 1 + 0xFF])) == "😀\ufffd"


@given(st.lists(st.integers(0, 6), max_size=20))
def test_other_decoders_stream_through_a_window(ids: list[int]) -> None:
    tokenizer = wordpiece_tokenizer()
    assert not tokenizer.spells_bytes
    pieces = stream(tokenizer, ids)
    assert text_of(pieces) == tokenizer.decode(ids)
    assert [span.id for piece in pieces for span in piece.spans] == ids


def test_stop_strings_wait_for_the_minimum_number_of_tokens() -> None:
    ids = TOKENIZER.encode("stop and stop again")
    detokenizer = Detokenizer(TOKENIZER, ["stop"], min_tokens=2)
    text = "".join(detokenizer.feed([token]).text for token in ids)
    assert detokenizer.stopped
    assert text == "stop and "


# ---- stop strings, against the same text read one character at a time ---------------------------

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def first_complete(text: str, stops: list[str]) -> str:
    """What precedes the stop string that is complete first; of several, the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))]
    return text


@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    if matcher.matched is None:
        shown += matcher.flush()
    assert shown == first_complete("".join(pieces), stops)


@given(st.lists(st.text("abc", max_size=4), max_size=8), STOPS)
def test_only_what_may_begin_a_stop_string_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(piece) for piece in pieces)
    held = "".join(pieces)[len(shown) :]
    assert matcher.matched or not held or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert [matcher.feed(text) for text in ("one\n", "\ntwo", "three")] == ["one", "", ""]
