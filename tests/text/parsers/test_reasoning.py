"""Reasoning apart from the reply: opened by the model, by the prompt, or never closed."""

from __future__ import annotations

import itertools

import pytest

from call_texts import TOOLS
from cases import cases
from pippin.text.parsers.formats import ReplyFormats
from pippin.text.pieces import FoldedText, TextPiece, joined

QWEN = ReplyFormats("qwen3_coder", "think")
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
OPEN, CLOSED, NEITHER = "assistant\n<think>\n", "<think>\n\n</think>\n\n", "assistant\n"


def parse(formats: ReplyFormats, prompt: str, parts: list[str], tools: bool) -> list[TextPiece]:
    parser = formats.parser(prompt, TOOLS if tools else ())
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return joined([*pieces, *parser.close()])


@cases("tools", [False, True])
@cases(
    ("prompt", "text", "reasoning", "content"),
    [
        (OPEN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (OPEN, "Hm.", "Hm.", ""),
        (OPEN, "\n</think>\n\nYes.", "", "Yes."),
        (OPEN, "<think>\nHm. </think>Yes.", "Hm.", "Yes."),
        (OPEN, "a\n\nb </thin k", "a\n\nb </thin k", ""),
        (NEITHER, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (NEITHER, "\n<think>Hm.", "Hm.", ""),
        (NEITHER, "  Yes. <think>no</think>", "", "  Yes. <think>no</think>"),
        (CLOSED, "Yes.\n", "", "Yes.\n"),
        ("The user wrote <think>\nassistant\n", "Yes.", "", "Yes."),
    ],
)
def test_reasoning_is_parted_from_content_however_the_text_is_cut(
    prompt: str, text: str, reasoning: str, content: str, tools: bool
) -> None:
    whole = parse(QWEN, prompt, [text], tools)
    assert FoldedText.of(whole) == FoldedText(content, reasoning)
    assert parse(QWEN, prompt, list(text), tools) == whole
    for cuts in itertools.combinations(range(len(text)), 2):
        parts = [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]
        assert parse(QWEN, prompt, parts, tools) == whole


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    folded = FoldedText.of(parse(QWEN, OPEN, [f"I could {CALL}\n</think>\n\n{CALL}"], True))
    assert folded.reasoning == f"I could {CALL}"
    assert [(call.name, call.arguments) for call in folded.calls.values()] == [("f", "{}")]
    assert folded.content == ""


def test_a_special_token_that_opens_calls_ends_the_reasoning() -> None:
    formats = ReplyFormats("kimi_k2", "think")
    text = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    folded = FoldedText.of(parse(formats, "", list(text), True))
    assert (folded.reasoning, folded.content) == ("Hm.", "")
    assert [call.name for call in folded.calls.values()] == ["f"]


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [
        ("mistral", "[THINK]Hm.[/THINK]Yes."),
        ("gemma4", "<|channel>thought\nHm.<channel|>Yes."),
        (
            "harmony",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Yes.<|return|>",
        ),
    ],
)
def test_other_marks_of_reasoning(reasoning: str, text: str) -> None:
    pieces = parse(ReplyFormats(None, reasoning), "", list(text), False)
    assert FoldedText.of(pieces) == FoldedText("Yes.", "Hm.")


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ '<think>\\n' }}...split('</think>')", "think"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("'<|channel>thought\\n<channel|>'", "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "harmony"),
        ("{{ content }}", None),
    ],
)
def test_a_template_tells_how_its_model_reasons(template: str, found: str | None) -> None:
    assert ReplyFormats.choose(template).reasoning == found


def test_no_text_is_held_back_once_it_cannot_be_a_mark() -> None:
    parser = QWEN.parser(OPEN)
    assert parser.feed("Hm, </thin")
    assert parser.num_held == len(" </thin")  # the space may belong to the mark
    assert parser.feed("g>")
    assert parser.num_held == 0
