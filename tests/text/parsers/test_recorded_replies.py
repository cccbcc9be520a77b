"""Turns with tool calls that families' chat templates wrote are read back: whole, and in parts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from cases import cases
from pippin.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ReplyFormats
from pippin.text.pieces import CallBegin, FoldedText, TextPiece, joined

RECORDED = Path(__file__).parents[2] / "fixtures/family_replies.jsonl"
HEADER, *REPLIES = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
TOOLS = HEADER["tools"]
APART = 40  # characters: more than a mark has
# Formats whose models have no template that shows a past call: tested on replies written by hand.
WITHOUT_A_TEMPLATE = {"longcat", "olmo3", "phi4_mini"}


def name_of(recorded: dict[str, Any]) -> str:
    return recorded["template"] + (", reasoning" if recorded["reasons"] else "")


def shows_reasoning(recorded: dict[str, Any]) -> bool:
    same = (each for each in REPLIES if each["template"] == recorded["template"])
    return any(each["reasons"] for each in same)


every_reply = pytest.mark.parametrize("recorded", REPLIES, ids=name_of)


def formats_of(recorded: dict[str, Any]) -> ReplyFormats:
    return ReplyFormats(recorded["tools"], recorded["reasoning"])


def parse(recorded: dict[str, Any], prompt_end: str, *parts: str) -> list[TextPiece]:
    parser = formats_of(recorded).parser(prompt_end, TOOLS)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.close()
    assert parser.num_held == 0
    return joined(pieces)


def found(pieces: list[TextPiece]) -> tuple[str, str, list[tuple[str, Any]]]:
    folded = FoldedText.of(pieces)
    calls = [(call.name, json.loads(call.arguments)) for call in folded.calls.values()]
    return folded.reasoning, folded.content, calls


def expected(recorded: dict[str, Any], reasoning: str) -> tuple[str, str, list[tuple[str, Any]]]:
    return reasoning, "", [(name, arguments) for name, arguments in recorded["calls"]]


@every_reply
def test_a_template_with_these_marks_has_the_familys_formats(recorded: dict[str, Any]) -> None:
    assert ReplyFormats.choose(" ".join(recorded["marks"])) == formats_of(recorded)


@every_reply
def test_the_calls_that_a_template_wrote_are_read_back(recorded: dict[str, Any]) -> None:
    pieces = parse(recorded, recorded["prompt_end"], recorded["reply"])
    assert found(pieces) == expected(recorded, "Hm." if recorded["reasons"] else "")


@every_reply
def test_they_are_read_back_wherever_the_reply_is_cut(recorded: dict[str, Any]) -> None:
    check_every_cut(recorded, recorded["prompt_end"], recorded["reply"])


@cases(
    "recorded",
    [
        each
        for each in REPLIES
        if each["reasoning"] in REASONING_FORMATS and not shows_reasoning(each)
    ],
    ids=name_of,
)
def test_they_are_read_back_behind_reasoning_in_the_familys_marks(recorded: dict[str, Any]) -> None:
    """Where the template leaves the reasoning of past turns out."""
    marks = REASONING_FORMATS[recorded["reasoning"]]
    for prompt_end, begin in ((marks.begin, ""), ("", marks.begin)):
        reply = f"{begin}Hm.{marks.end}{recorded['reply']}"
        assert found(parse(recorded, prompt_end, reply)) == expected(recorded, "Hm.")
        check_every_cut(recorded, prompt_end, reply)


def check_every_cut(recorded: dict[str, Any], prompt_end: str, reply: str) -> None:
    """Some cuts at once, so far apart that no mark is cut twice: that takes a tenth of the time."""
    assert max(map(len, formats_of(recorded).parser(prompt_end, TOOLS).marks)) < APART
    whole = without_ids(parse(recorded, prompt_end, reply))
    assert without_ids(parse(recorded, prompt_end, *reply)) == whole  # letter by letter
    for first in range(APART):
        cuts = [0, *range(first, len(reply), APART), len(reply)]
        parts = [reply[start:end] for start, end in itertools.pairwise(cuts)]
        assert without_ids(parse(recorded, prompt_end, *parts)) == whole, parts


def without_ids(pieces: list[TextPiece]) -> list[TextPiece]:
    """They are random."""
    return [
        CallBegin(each.index, "", each.name) if isinstance(each, CallBegin) else each
        for each in pieces
    ]


def test_every_format_has_a_template_that_wrote_it() -> None:
    assert {each["tools"] for each in REPLIES} == set(TOOL_FORMATS) - WITHOUT_A_TEMPLATE
