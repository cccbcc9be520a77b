"""Every format, fed replies in parts: the same pieces however text was cut, and nothing lost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable

import pytest

from call_texts import (
    STRINGS,
    TOOLS,
    WITHOUT_A_MARK,
    WORDS,
    Example,
    examples,
    write_calls,
)
from cases import cases
from pippin.text.parsers.formats import TOOL_FORMATS
from pippin.text.pieces import CallArguments, CallBegin, CallEnd, FoldedText, TextPiece, joined

FORMATS = list(TOOL_FORMATS)
NUM_CUT_EVERYWHERE = 3  # of the 200 replies; with all of them this takes minutes


def parse(format: str, parts: Iterable[str]) -> list[TextPiece]:
    ids = (f"id-{number}" for number in itertools.count())
    parser = TOOL_FORMATS[format].parser(TOOLS, lambda: next(ids))
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.close()
    assert parser.num_held == 0
    return joined(pieces)


def random_parts(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 12)))
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def check_every_cut(format: str, made: list[Example]) -> None:
    """Once where the same text, more than a mark has, is before and behind the cut."""
    size = max(12, 1 + max(map(len, TOOL_FORMATS[format].parser().marks), default=0))
    tried: set[tuple[str, str]] = set()
    for example in made:
        text = example.text
        whole = parse(format, [text])
        for at in range(1, len(text)):
            near = (text[max(0, at - size) : at], text[at : at + size])
            if near not in tried:
                tried.add(near)
                assert parse(format, [text[:at], text[at:]]) == whole, text


@pytest.mark.slow
@cases("format", FORMATS)
def test_the_pieces_do_not_depend_on_how_the_text_was_cut(format: str) -> None:
    rng = random.Random(format)
    for example in examples(format):
        whole = parse(format, [example.text])
        assert parse(format, example.text) == whole, example.text  # letter by letter
        for _ in range(2):
            assert parse(format, random_parts(example.text, rng)) == whole, example.text
    check_every_cut(format, examples(format, NUM_CUT_EVERYWHERE))


@pytest.mark.slow
@cases("format", FORMATS)
def test_marks_and_scraps_in_any_order_give_the_same_pieces_too(format: str) -> None:
    rng = random.Random(format)
    parser = TOOL_FORMATS[format].parser
    call = write_calls(format, [("get_weather", {"text": "a", "count": 1})])
    scraps = [*sorted(parser().marks), *'{}[]":,\\>\n ', "get_weather", '"name"', "f" * 300, call]
    scraps += [call[:at] for at in range(0, len(call), 7)]
    for _ in range(100):
        text = "".join(rng.choices(scraps, k=rng.randint(2, 8)))
        whole = parse(format, [text])
        assert parse(format, text) == whole, text
        assert parse(format, random_parts(text, rng)) == whole, text


@cases("format", FORMATS)
def test_calls_are_found_with_their_values_exact_and_all_else_is_content(format: str) -> None:
    num_good = num_without_calls = 0
    for example in examples(format):
        pieces = parse(format, [example.text])
        folded = FoldedText.of(pieces)
        begun = [piece.index for piece in pieces if isinstance(piece, CallBegin)]
        ended = [piece.index for piece in pieces if isinstance(piece, CallEnd)]
        assert begun == ended == list(range(len(begun)))
        found = [(call.name, json.loads(call.arguments)) for call in folded.calls.values()]
        assert all(isinstance(arguments, dict) for _, arguments in found)
        if example.calls is not None:
            assert found == example.calls, example.text
            assert "".join(folded.content.split()) == example.letters, example.text
            num_good += 1
        elif not found and format != "harmony":  # whose messages have headers
            assert folded.content == example.text
            num_without_calls += 1
    assert num_good == 100
    assert num_without_calls > 20 or format == "harmony"


@cases("format", FORMATS)
@cases("text", [*STRINGS, *WORDS, "\n leading", "trailing \n\n", '{"a": 1}'])
def test_a_reply_without_marks_is_its_content(format: str, text: str) -> None:
    assert FoldedText.of(parse(format, text)) == FoldedText(content=text)


@cases("format", FORMATS)
def test_text_and_a_long_string_argument_are_passed_on_while_they_come(format: str) -> None:
    parser = TOOL_FORMATS[format].parser(TOOLS)
    parser.feed("Well")
    assert parser.num_held == 0  # it cannot be a mark
    parser = TOOL_FORMATS[format].parser(TOOLS)
    text = write_calls(format, [("get_weather", {"text": "x" * 1000})])
    middle = text.index("x" * 1000) + 500
    pieces = joined(parser.feed(text[:middle]))
    arguments = [piece.text for piece in pieces if isinstance(piece, CallArguments)]
    assert len(arguments) == 1
    assert arguments[0].endswith("x" * 400)


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "glm", "kimi_k2", "deepseek_v31"])
def test_a_bad_call_does_not_lose_the_next_one(format: str) -> None:
    good = ("get_weather", {"text": "Tokyo"})
    text = write_calls(format, [good, good])
    first = text.index("Tokyo")
    for num_lost in (6, 7):  # the end of the string, and of what is around it
        bad = text[: first + 3] + text[first + num_lost :]
        folded = FoldedText.of(parse(format, [bad]))
        assert [call.name for call in folded.calls.values()][-1:] == ["get_weather"]
        assert json.loads(list(folded.calls.values())[-1].arguments) == good[1]


@pytest.mark.parametrize("format", FORMATS)
def test_of_a_cut_reply_no_markup_is_content(format: str) -> None:
    """Two calls behind text, cut by `max_tokens` at every place: a call is there once its arguments
    have begun."""
    before = "" if format in WITHOUT_A_MARK else "Well, "
    if format == "harmony":
        before = "<|channel|>final<|message|>Well, <|end|><|start|>assistant"
    content = "Well," if before else ""
    call = ("get_weather", {"text": "Tokyo", "count": 3})
    text = before + write_calls(format, [call, call])
    for at in range(len(text) + 1):
        parser = TOOL_FORMATS[format].parser(TOOLS)
        folded = FoldedText()
        for piece in [*parser.feed(text[:at]), *parser.cut()]:
            if not (isinstance(piece, CallEnd) and piece.unparsed is not None):
                folded.add(piece)
        assert content.startswith(folded.content.strip()), text[:at]
        assert at < len(before) or folded.content.strip() == content, text[:at]
        for made in folded.calls.values():
            assert made.name == call[0]
            assert made.arguments, text[:at]
        assert parser.num_held == 0


@pytest.mark.parametrize("format", WITHOUT_A_MARK)
@pytest.mark.parametrize(
    "text", ['{"city": "Par', '{"name": "Bob', "[Note that this", "[1, 2", "\n"]
)
def test_of_a_cut_reply_what_cannot_be_a_call_is_content(format: str, text: str) -> None:
    parser = TOOL_FORMATS[format].parser(TOOLS)
    pieces = [piece for char in text for piece in parser.feed(char)]
    assert FoldedText.of(joined([*pieces, *parser.cut()])) == FoldedText(content=text)
