"""Replies of each family, as its chat template writes them or by hand: whole, and in parts; and
with the slips that its models are known for."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from bundled import BUNDLED_PATH
from call_texts import NAMES, TOOLS, Call, write_calls
from cases import cases
from pippin.errors import ConfigError
from pippin.text.bundle import TextBundle
from pippin.text.lexer import Lexer
from pippin.text.parsers.formats import (
    HARMONY,
    REASONING_FORMATS,
    TOOL_FORMATS,
    VLLM_REASONING_PARSERS,
    VLLM_TOOL_PARSERS,
    ReplyFormats,
)
from pippin.text.pieces import (
    MAX_ARGUMENTS_DEPTH,
    CallBegin,
    CallEnd,
    Content,
    FoldedText,
    TextPiece,
    joined,
)

RECORDED = Path(__file__).parents[2] / "fixtures/family_replies.jsonl"
HEADER, *REPLIES = map(json.loads, RECORDED.read_text(encoding="utf-8").splitlines())
APART = 40  # characters: more than a mark has
# Formats whose models have no template that shows a past call.
WITHOUT_A_TEMPLATE = {"longcat", "olmo3", "phi4_mini"}
TEXT = 'it\'s "wet" <b>\nTokyo'
CALLS = [
    ("get_weather", {"text": TEXT, "count": 3, "flag": True}),
    ("f", {"list": ["a", "b"], "tree": {"a": [1, None]}}),
]
JSON_CALLS = [
    '{"name": "get_weather", "arguments": {"text": "it\'s \\"wet\\" <b>\\nTokyo", "count": 3, '
    '"flag": true}}',
    '{"name": "f", "arguments": {"list": ["a", "b"], "tree": {"a": [1, null]}}}',
]


# (tools, reasoning, end of the prompt, reply); every reply reasons "Hm." and makes the two calls.
# Of families without a recorded template, or whose recorded one has other marks of reasoning.
BY_HAND = {
    "olmo3": (
        *("olmo3", "think", "<think>"),
        'Hm.</think><function_calls>get_weather(text="it\'s \\"wet\\" <b>\\nTokyo", count=3, '
        'flag=true)\nf(list=["a", "b"], tree={"a": [1, null]})</function_calls>',
    ),
    "hunyuan": (
        *("jamba", "think_answer", ""),
        f"<think>\nHm.\n</think>\n<answer>\n<tool_calls>[{', '.join(JSON_CALLS)}]</tool_calls>\n"
        "</answer>",
    ),
    "granite3": (
        *("granite3", "think_response", ""),
        f"<think>Hm.</think><response><|tool_call|>[{', '.join(JSON_CALLS)}]</response>",
    ),
    "granite3.1": (
        *("granite3", "granite", ""),
        "Here is my thought process:\n\nHm.\n\nHere is my response:\n<tool_call> [\n"
        + ",\n".join(JSON_CALLS)
        + "\n]",
    ),
    "phi4_mini": (
        *("phi4_mini", "think", "<think>"),
        f"Hm.</think>functools[{', '.join(JSON_CALLS)}]",
    ),
    "ernie": (
        *("hermes", "think_response", "<think>\n"),
        "Hm.\n</think>\n\n\n"
        + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in JSON_CALLS),
    ),
    "longcat": (
        *("longcat", "think", "<think>"),
        "Hm.</think><longcat_tool_call>get_weather\n<longcat_arg_key>text</longcat_arg_key>\n"
        f"<longcat_arg_value>{TEXT}</longcat_arg_value>\n<longcat_arg_key>count</longcat_arg_key>\n"
        "<longcat_arg_value>3</longcat_arg_value>\n<longcat_arg_key>flag</longcat_arg_key>\n"
        "<longcat_arg_value>true</longcat_arg_value>\n</longcat_tool_call>\n"
        f"<longcat_tool_call>{JSON_CALLS[1]}</longcat_tool_call>",
    ),
}


def parse(formats: ReplyFormats, prompt: str, *parts: str, tools: Any = TOOLS) -> list[TextPiece]:
    parser = formats.parser(prompt, tools)
    pieces = [piece for part in parts for piece in parser.feed(part)]
    pieces += parser.close()
    assert parser.num_held == 0
    for number, end in enumerate(piece for piece in pieces if isinstance(piece, CallEnd)):
        assert end.index == number
    return [p for p in joined(pieces) if not hasattr(p, "id")]  # ids are random


def calls_in(folded: FoldedText) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in folded.calls.values()]


def fold(formats: ReplyFormats, prompt: str, text: str, tools: Any = TOOLS) -> FoldedText:
    parser = formats.parser(prompt, tools)
    return FoldedText.of([*parser.feed(text), *parser.close()])


def check_every_cut(formats: ReplyFormats, prompt: str, reply: str, tools: Any = TOOLS) -> None:
    """Some cuts at once, so far apart that no mark is cut twice: that takes a tenth of the time."""
    assert max(map(len, formats.parser(prompt, tools).marks), default=0) < APART
    whole = parse(formats, prompt, reply, tools=tools)
    assert parse(formats, prompt, *reply, tools=tools) == whole  # letter by letter
    for first in range(APART):
        cuts = [0, *range(first, len(reply), APART), len(reply)]
        parts = [reply[start:end] for start, end in itertools.pairwise(cuts)]
        assert parse(formats, prompt, *parts, tools=tools) == whole, parts


@cases("family", BY_HAND)
def test_a_familys_reasoning_and_calls_are_found_wherever_its_reply_is_cut(family: str) -> None:
    tools, reasoning, prompt, reply = BY_HAND[family]
    formats = ReplyFormats(tools, reasoning)
    folded = fold(formats, prompt, reply)
    assert calls_in(folded) == CALLS
    assert (folded.content, folded.reasoning) == ("", "Hm.")
    check_every_cut(formats, prompt, reply)


@pytest.mark.parametrize(
    "recorded", REPLIES, ids=lambda each: f"{each['template']}-{each['reasons']}"
)
def test_what_a_template_wrote_is_read_back_wherever_it_is_cut(recorded: dict[str, Any]) -> None:
    """Where the template leaves the reasoning of past turns out, behind some in its marks too."""
    formats = ReplyFormats(recorded["tools"], recorded["reasoning"])
    assert ReplyFormats.choose(" ".join(recorded["marks"])) == formats
    written = [(recorded["prompt_end"], recorded["reply"], "Hm." if recorded["reasons"] else "")]
    same = (each for each in REPLIES if each["template"] == recorded["template"])
    marks = REASONING_FORMATS.get(recorded["reasoning"])
    if marks is not None and not any(each["reasons"] for each in same):
        behind = f"Hm.{marks.end}{recorded['reply']}"
        written += [(marks.begin, behind, "Hm."), ("", marks.begin + behind, "Hm.")]
    for prompt_end, reply, reasoning in written:
        folded = fold(formats, prompt_end, reply, HEADER["tools"])
        found = [list(call) for call in calls_in(folded)]
        assert (folded.reasoning, folded.content, found) == (reasoning, "", recorded["calls"])
        check_every_cut(formats, prompt_end, reply, HEADER["tools"])


def test_every_format_has_a_template_that_wrote_it() -> None:
    assert {each["tools"] for each in REPLIES} == set(TOOL_FORMATS) - WITHOUT_A_TEMPLATE


# ---- reasoning, and marks around an answer ---------------------------------------------------

QWEN = ReplyFormats("qwen3_coder", "think")
CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
OPEN, CLOSED, NEITHER = "assistant\n<think>\n", "<think>\n\n</think>\n\n", "assistant\n"


@cases("tools", [(), TOOLS])
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
    prompt: str, text: str, reasoning: str, content: str, tools: Any
) -> None:
    whole = parse(QWEN, prompt, text, tools=tools)
    assert FoldedText.of(whole) == FoldedText(content, reasoning)
    assert parse(QWEN, prompt, *text, tools=tools) == whole
    for cuts in itertools.combinations(range(len(text)), 2):
        parts = [text[a:b] for a, b in itertools.pairwise((0, *cuts, len(text)))]
        assert parse(QWEN, prompt, *parts, tools=tools) == whole


def test_calls_are_looked_for_behind_the_reasoning_only() -> None:
    folded = fold(QWEN, OPEN, f"I could {CALL}\n</think>\n\n{CALL}")
    assert folded.reasoning == f"I could {CALL}"
    assert [(call.name, call.arguments) for call in folded.calls.values()] == [("f", "{}")]
    assert folded.content == ""


def test_a_special_token_that_opens_calls_ends_the_reasoning() -> None:
    formats = ReplyFormats("kimi_k2", "think")
    text = (
        "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    folded = fold(formats, "", text)
    assert (folded.reasoning, folded.content) == ("Hm.", "")
    assert [call.name for call in folded.calls.values()] == ["f"]


def test_no_text_is_held_back_once_it_cannot_be_a_mark() -> None:
    parser = QWEN.parser(OPEN)
    assert parser.feed("Hm, </thin")
    assert parser.num_held == len(" </thin")  # the space may belong to the mark
    assert parser.feed("g>")
    assert parser.num_held == 0


@cases("tools", [(), TOOLS])
@cases(
    ("reasoning", "prompt", "text"),
    [
        ("think_response", "<think>\n", "Hm.\n</think>\n\n<response>\nYes.\n</response>\n"),
        ("think_response", "<think>\n", "Hm.\n</think>\nYes."),
        ("think_answer", "", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>"),
        ("mistral", "", "[THINK]Hm.[/THINK]Yes."),
        ("gemma4", "", "<|channel>thought\nHm.<channel|>Yes."),
        (
            *("harmony", ""),
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final"
            "<|message|>Yes.<|return|>",
        ),
        ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes."),
        ("granite", "", "Here is my thought process: Hm.\n\nHere is my response:\nYes."),
        ("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Yes."),
        (
            *("cohere", ""),
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ),
        ("cohere_text", "<|START_THINKING|>", "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>"),
        (
            *("muse_spark", "<|start|>assistant"),
            " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        ),
        (
            *("kimi_k3", "<|open|>think<|sep|>"),
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
            "<|close|>message<|sep|>",
        ),
    ],
)
def test_marks_around_an_answer_are_no_content(
    reasoning: str, prompt: str, text: str, tools: Any
) -> None:
    formats = ReplyFormats("hermes", reasoning)
    assert fold(formats, prompt, text, tools) == FoldedText("Yes.", "Hm.")
    check_every_cut(formats, prompt, text, tools)


def test_a_trailer_in_the_middle_of_an_answer_or_of_a_call_is_text() -> None:
    formats = ReplyFormats("hermes", "think_response")
    text = "<response>\nEnd with </response> always.\n</response>"
    assert fold(formats, "</think>", text).content == "End with </response> always."
    call = '<tool_call>{"name": "f", "arguments": {"text": "a</response>b"}}</tool_call>'
    assert calls_in(fold(formats, "</think>", call)) == [("f", {"text": "a</response>b"})]


def test_a_header_that_never_ends_is_text() -> None:
    formats = ReplyFormats("muse_spark", "muse_spark")
    for text in ("to=be or not\nto=be", "to=" + "x" * 1000):
        assert fold(formats, "", text).content == text
        assert fold(formats, "", f"{text}<|eom|>").content == text


# ---- calls as models write them, with their slips


def pieces_of(format: str, text: str) -> list[TextPiece]:
    parser = TOOL_FORMATS[format].parser(TOOLS)
    return joined([*parser.feed(text), *parser.close()])


def read(format: str, text: str) -> tuple[str, list[Call]]:
    folded = fold(ReplyFormats(format), "", text)
    return folded.content, calls_in(folded)


WEATHER = ("get_weather", {"text": "Tokyo"})
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"text": "Tokyo"}}\n</tool_call>'
INVOKE = '<invoke name="get_weather">\n<parameter name="text">Tokyo</parameter>\n</invoke>'


@cases(
    ("format", "text", "content", "calls"),
    [
        ("hermes", f"Let me look.\n\n{HERMES}", "Let me look.", [WEATHER]),
        ("hermes", f"{HERMES}\n{HERMES}\n", "", [WEATHER, WEATHER]),
        ("hermes", f"{HERMES}\n\nDone.", "Done.", [WEATHER]),
        ("hermes", f"Wait.\n{HERMES}\nDone.", "Wait.\nDone.", [WEATHER]),
        ("hermes", HERMES.replace("</tool_call>", ""), "", [WEATHER]),
        ("hermes", HERMES.replace("}}", "}"), "", [WEATHER]),
        ("hermes", HERMES.replace("}}", "}}}"), "", [WEATHER]),
        (
            "hermes",
            '<tool_call>{"arguments": {"text": "Tokyo"}, "name": "get_weather"}</tool_call>',
            "",
            [WEATHER],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}", "id": [{}]}</tool_call>',
            "",
            [("f", {"a": 1})],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "1\n2\t</tool_call> 3"}}</tool_call>',
            "",
            [("f", {"a": "1\n2\t</tool_call> 3"})],
        ),
        (
            "llama3",
            'Sure. <|python_tag|>{"type": "function", "name": "get_weather", '
            '"parameters": {"text": "Tokyo"}}; {"name": "get_weather", "parameters": {}}',
            "Sure.",
            [WEATHER, ("get_weather", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"text": "Tokyo"}, "id": "a"}, '
            '{"name": "f", "arguments": {}}]',
            "",
            [WEATHER, ("f", {})],
        ),
        (
            "mistral",
            '[TOOL_CALLS]get_weather[ARGS]{"text": "Tokyo"}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}',
            "",
            [WEATHER, ("f", {})],
        ),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", {})]),
        (
            "glm",
            "<tool_call>get_weather<arg_key>text</arg_key><arg_value>Tokyo</arg_value></tool_call>",
            "",
            [WEATHER],
        ),
        ("minimax_m2", f"In XML that is {INVOKE}", f"In XML that is {INVOKE}", []),
        (
            "gemma4",
            '<|tool_call>call:f{a:<|"|>x, y}<|"|>,b:[1,{c:true,d:None}],e:{}}<tool_call|>',
            "",
            [("f", {"a": "x, y}", "b": [1, {"c": True, "d": None}], "e": {}})],
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant to=functions."
            'get_weather<|channel|>commentary json<|message|>{"text": "Tokyo"}<|call|>',
            "I will look.",
            [WEATHER],
        ),
        (
            "harmony",
            " to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>",
            "",
            [("f", {})],
        ),
    ],
)
def test_calls_as_models_write_them(
    format: str, text: str, content: str, calls: list[Call]
) -> None:
    assert read(format, text) == (content, calls)


# A value in quotes is what the schema says, if it can be that.
QUOTED = {"count": 3, "text": "3", "flag": "no", "other": "3"}
CALLED_WITH_CONTAINERS = {"list": ["a"], "tree": {"a": [1, None]}}


@cases(
    ("format", "text", "arguments"),
    [
        ("pythonic", "[f(text='a\\x41\\u00e9\\U0001F600\\q')]", {"text": "aAé😀\\q"}),
        ("pythonic", '[f(text="\\ud83d\\ude00")]', {"text": "😀"}),
        ("pythonic", "[f(list=(1, 2,), tree={1: ()},)]", {"list": [1, 2], "tree": {"1": []}}),
        ("pythonic", "[f(text=New York, count=-2.5e3)]", {"text": "New York", "count": -2500.0}),
        ("pythonic", "<|python_start|>[f()]<|python_end|>", {}),
        ("pythonic", '[f(count="3", text="3", flag="no", other="3")]', QUOTED),
        ("lfm2", "<|tool_call_start|>[f(count='3', text='3', flag='no', other='3')]", QUOTED),
        (
            "gemma4",
            '<|tool_call>call:f{count:<|"|>3<|"|>,text:<|"|>3<|"|>,flag:<|"|>no<|"|>,'
            'other:<|"|>3<|"|>}<tool_call|>',
            QUOTED,
        ),
        ("pythonic", "[f(list=\"['a']\", tree='{\"a\": [1, None]}')]", CALLED_WITH_CONTAINERS),
        ("lfm2", "<|tool_call_start|>f(count=1)<|tool_call_end|>", {"count": 1}),
        ("lfm2", "<|tool_call_start|>[f(count=1)]", {"count": 1}),
        ("cohere", '<|START_ACTION|>{"tool_name": "f"}<|END_ACTION|>', {}),
        ("apertus", '<|tools_prefix|>[{"f": "{\\"count\\": 1}"}]<|tools_suffix|>', {"count": 1}),
        ("phi4_mini", '<|tool_call|>[{"name": "f"}]<|/tool_call|>', {}),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"'
            '<|sep|>{"count": 1}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
            {"count": 1},
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument '
            'key="count" type="integer"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|>",
            {"count": 1},
        ),
        ("gemma4", "<|tool_call>call:f{count :1,}<tool_call|>", {"count": 1}),
        (
            "glm",
            '<tool_call>{"name": "f", "arguments": {"count": 1}}</tool_call>',
            {"count": 1},
        ),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"count": 1}}}]', {"count": 1}),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" '
            'string="true">12</｜DSML｜parameter><｜DSML｜parameter name="other" string="true">12'
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
            {"text": "12", "other": "12"},
        ),
        (
            "minicpm5",
            '<function name="f"><param name="text"><![CDATA[a</param>]]b]]></param></function>',
            {"text": "a</param>]]b"},
        ),
    ],
)  # fmt: skip
def test_slips_and_rare_spellings_are_read(format: str, text: str, arguments: Any) -> None:
    assert read(format, text) == ("", [("f", arguments)])


def qwen(body: str) -> str:
    return f"<tool_call>\n<function=get_weather>\n{body}</function>\n</tool_call>"


@cases(
    ("body", "arguments"),
    [
        ("", {}),
        ("<parameter=text>\nTokyo\n</parameter>\n", {"text": "Tokyo"}),
        ("<parameter=text>Tokyo</parameter>", {"text": "Tokyo"}),
        ("<parameter=text>\n\n\n</parameter>\n", {"text": "\n"}),
        ("<parameter=text>\n12\n</parameter>\n", {"text": "12"}),
        ("<parameter=text>\na</parameter>b\n</parameter>\n", {"text": "a</parameter>b"}),
        ("<parameter=text>\na\n<parameter=count>\n2\n</parameter>\n", {"text": "a", "count": 2}),
        ("<parameter=text>\na\n", {"text": "a"}),  # its end is missing
        (f"<parameter=count>\n{2**70}\n</parameter>\n", {"count": 2**70}),
        ("<parameter=count>\nmany\n</parameter>\n", {"count": "many"}),
        ("<parameter=flag>\nTrue\n</parameter>\n", {"flag": True}),
        ("<parameter=maybe>\nNone\n</parameter>\n", {"maybe": None}),
        ("<parameter=maybe>\n7\n</parameter>\n", {"maybe": 7}),
        ("<parameter=tree>\n{'a': None}\n</parameter>\n", {"tree": {"a": None}}),
        ("<parameter=tree>\n{broken\n</parameter>\n", {"tree": "{broken"}),
        ("<parameter=unknown>\n[1]\n</parameter>\n", {"unknown": [1]}),
        ("<parameter=unknown>\nword\n</parameter>\n", {"unknown": "word"}),
    ],
)  # fmt: skip
def test_bare_values_get_the_type_that_the_schema_wants(
    body: str, arguments: dict[str, Any]
) -> None:
    assert read("qwen3_coder", qwen(body)) == ("", [("get_weather", arguments)])


def test_qwens_calls_need_not_be_wrapped() -> None:
    text = qwen("<parameter=text>\nTokyo\n</parameter>\n").removeprefix("<tool_call>\n")
    assert read("qwen3_coder", f"Hm. {text}") == ("Hm.", [WEATHER])


def test_the_end_of_a_reply_ends_what_it_may() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=text>\nTokyo\n</function>\n"
    assert read("qwen3_coder", text) == ("", [WEATHER])


def test_nothing_of_a_good_call_leaks_when_the_next_one_is_bad() -> None:
    array = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": 5}]'
    assert read("mistral", array) == (', {"name": 5}]', [("f", {})])
    listed = '{"name": "get_weather", "parameters": {"text": "Tokyo"}}; {"name": "unknown"}'
    assert read("llama3", listed) == ('; {"name": "unknown"}', [WEATHER])


@cases(
    ("format", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>[]</tool_call> and more"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 5000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}"),
        ("llama3", '{"name": "Ada", "parameters": {"born": 1815}}'),
        ("llama3", '{"answer": {"name": "get_weather", "parameters": {}}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] I do not know how"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("minimax_m1", "<tool_calls> is a tag</tool_calls>"),
        ("minimax_m2", "<minimax:tool_call>\n<invoke name=f></invoke>\n</minimax:tool_call>"),
        ("gemma4", "<|tool_call>call:f{a:" + "[" * 5000 + "<tool_call|>"),
        ("qwen3_coder", "<tool_call>\n<function=" + "f" * 1000),
        ("qwen3_coder", "<tool_call>\n<function=f>\nwhat\n</function>\n</tool_call>"),
        ("pythonic", "[1, 2, 3] is a list"),
        ("pythonic", "[unknown(text='a')]"),
        ("pythonic", "[f('positional')]"),
        ("pythonic", "[f(text=g(1))]"),
        ("pythonic", "[f(list=" + "[" * 5000),
        ("pythonic", "[f(text='never closed)]"),
        ("lfm2", "<|tool_call_start|>[f(text='a)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(text='\\ud83')]<|tool_call_end|>"),
        ("olmo3", "<function_calls></function_calls>"),
        ("nemotron_h", "<TOOLCALL>[]</TOOLCALL>"),
        ("jamba", "<tool_calls>[1]</tool_calls>"),
        ("phi4_mini", "functools is a module of Python"),
        ("apertus", '<|tools_prefix|>[{"": {}}]<|tools_suffix|>'),
        ("cohere", '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>'),
        ("minicpm5", '<function name="f"' + ' a="b"' * 1000 + ">"),
        ("minicpm5", '<function id="f"></function>'),
        ("deepseek_v4", "<｜DSML｜tool_calls></｜DSML｜tool_calls>"),
    ],
)
def test_what_cannot_be_parsed_is_content(format: str, text: str) -> None:
    assert read(format, text) == (text, [])


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return int(isinstance(value, dict | list)) + max(map(depth_of, inner), default=0)


@cases("format", TOOL_FORMATS)
def test_arguments_are_nested_no_deeper_than_the_limit(format: str) -> None:
    """Whatever the interpreter's own limit of recursion is."""
    deep: Any = []
    for _ in range(MAX_ARGUMENTS_DEPTH):
        deep = [deep]
    allowed, refused = (
        write_calls(format, [("get_weather", {"value": value})]) for value in (deep[0][0], deep)
    )
    ((_, arguments),) = read(format, allowed)[1]
    assert depth_of(arguments) == MAX_ARGUMENTS_DEPTH
    for _, arguments in read(format, refused)[1]:
        assert depth_of(arguments["value"]) <= MAX_ARGUMENTS_DEPTH


def test_an_answer_in_json_is_not_held_back_as_a_call() -> None:
    parser = TOOL_FORMATS["llama3"].parser(TOOLS)
    assert joined(parser.feed('{"answer": [1, 2, ')) == [Content('{"answer": [1, 2,')]


def test_a_call_of_kimis_keeps_the_id_that_the_model_gave_it() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
        '<|tool_call_argument_begin|>{"text": "Tokyo"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    assert pieces_of("kimi_k2", text)[0] == CallBegin(0, "functions.get_weather:3", "get_weather")


@pytest.mark.parametrize(
    ("format", "pattern"), [("mistral", r"[A-Za-z0-9]{9}"), ("hermes", r"call_[0-9a-f]{24}")]
)
def test_calls_get_ids_that_the_template_will_take_back(format: str, pattern: str) -> None:
    text = write_calls(format, [WEATHER, WEATHER])
    ids = [piece.id for piece in pieces_of(format, text) if isinstance(piece, CallBegin)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(pattern, id) for id in ids)


def test_harmony_tells_reasoning_calls_and_content_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"text": "Tokyo"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    )
    folded = FoldedText.of(pieces_of("harmony", text))
    assert (folded.reasoning, folded.content) == ("Hm, weather.", "It rains.")
    assert [call.arguments for call in folded.calls.values()] == ['{"text": "Tokyo"}']


# ---- against mlx-lm's parsers, on what they read right ------------------------------------

THEIRS = {
    "hermes": "json_tools",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm47",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral_array": "mistral",
    "kimi_k2": "kimi_k2",
    "gemma4": "gemma4",
    "function_gemma": "function_gemma",
    "lfm2": "pythonic",
    "kimi_k3": "kimi_k3",
    "longcat": "longcat",
    "minicpm5": "minicpm5",
    "muse_spark": "muse_spark",
}


@cases("format", THEIRS)
def test_calls_are_those_that_mlx_lm_finds(format: str) -> None:
    theirs = importlib.import_module(f"mlx_lm.tool_parsers.{THEIRS[format]}")
    rng = random.Random(format)
    for _ in range(20):
        arguments = {
            "text": rng.choice(["Tokyo", "a b", "ünï 😀"]),
            "count": rng.randint(-5, 2**40),
            "flag": rng.random() < 0.5,
        }
        text = write_calls(format, [(rng.choice(NAMES[:1]), arguments)])
        inner = text.removeprefix(theirs.tool_call_start)
        found = theirs.parse_tool_call(inner.removesuffix(theirs.tool_call_end).strip(), TOOLS)
        (found,) = found if isinstance(found, list) else [found]
        assert read(format, text) == ("", [(found["name"], found["arguments"])])


def test_a_long_call_does_not_make_each_further_token_dearer() -> None:
    """What was taken is not copied again with every part that arrives."""
    parser = TOOL_FORMATS["hermes"].parser(TOOLS)
    opening = '<tool_call>{"name": "f", "arguments": {"text": "'
    pieces = parser.feed(opening)
    for _ in range(1000):
        pieces += parser.feed("x" * 100)
        assert len(parser.lexer._text) <= 200
    pieces += parser.close()
    assert FoldedText.of(pieces).content == opening + "x" * 100_000


def test_arguments_that_are_no_object_do_not_hold_the_next_call() -> None:
    bad = '<tool_call>{"name": "get_weather", "arguments": '
    assert read("hermes", bad + HERMES) == (bad.strip(), [WEATHER])


def test_a_quoted_value_that_never_ends_is_no_argument_of_the_next_call() -> None:
    folded = fold(
        ReplyFormats("gemma4"),
        "",
        '<|tool_call>call:f{count:<|"|>3<tool_call|><|tool_call>call:f{text:<|"|>a<|"|>}<tool_call|>',
    )
    assert calls_in(folded) == [("f", {"text": "a"})]


@pytest.mark.parametrize(
    ("text", "names", "content"),
    [
        ('{"name": "f", "parameters": {}}{"name": "f", "parameters": {}}', ["f", "f"], ""),
        ('{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}', ["f", "f"], ""),
        ('{"name": "f", "parameters": {}} {"a": 1}', ["f"], '{"a": 1}'),
    ],
)
def test_llamas_calls_may_follow_each_other_without_a_semicolon(
    text: str, names: list[str], content: str
) -> None:
    folded = fold(ReplyFormats("llama3"), "", text)
    assert ([call.name for call in folded.calls.values()], folded.content) == (names, content)


def test_a_look_ahead_keeps_what_it_has_not_taken() -> None:
    lexer = Lexer()
    lexer.record()
    steps = lexer.is_followed("ab", ("c",))
    for part in ("ab", " ", "\n"):
        lexer.feed(part)
        next(steps)
    lexer.feed("c")
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value is True
    assert lexer.num_left == len("ab \nc")


# ---- which format a template speaks --------------------------------------------------------


@cases("format", TOOL_FORMATS)
def test_a_template_that_writes_calls_in_a_format_is_known_by_them(format: str) -> None:
    calls = write_calls(format, [WEATHER])
    headers = {
        "llama3": "<|start_header_id|>",
        "harmony": "<|start|>",
        "pythonic": "Use [func_name1(params_name1=params_value1)].",
    }
    header = headers.get(format, "")
    assert ReplyFormats.choose(header + calls).tools == format


def test_every_format_is_documented() -> None:
    document = Path(__file__).parents[3] / "docs" / "api" / "tools.md"
    rows = re.findall(r"^\| `(\w+)` \|", document.read_text(encoding="utf-8"), re.MULTILINE)
    pieces = ["Content", "Reasoning", "CallBegin", "CallArguments", "CallEnd"]
    assert rows == [*pieces, *TOOL_FORMATS, *REASONING_FORMATS, HARMONY]


def test_a_template_without_marks_has_no_formats() -> None:
    assert ReplyFormats.choose("{{ messages }}") == ReplyFormats(None, None)


def test_formats_can_be_chosen_by_name_and_turned_off() -> None:
    chosen = ReplyFormats.choose("<tool_call><think></think>", tools="llama3", reasoning="off")
    assert chosen == ReplyFormats("llama3", None)
    with pytest.raises(ConfigError, match=r"tool_parser 'herms' is unknown \(did you mean hermes"):
        ReplyFormats.choose("", tools="herms")
    with pytest.raises(
        ConfigError, match="reasoning_parser 'x' is unknown: use one of auto, off, thi"
    ):
        ReplyFormats.choose("", reasoning="x")


def test_a_checkpoints_formats_can_be_named_when_it_is_loaded() -> None:
    chosen = TextBundle.load(BUNDLED_PATH, tool_parser="hermes", reasoning_parser="off")
    assert chosen.formats == ReplyFormats("hermes", None)


@cases("name", [*VLLM_TOOL_PARSERS, *TOOL_FORMATS, *VLLM_REASONING_PARSERS, *REASONING_FORMATS])
def test_a_parser_of_vllm_names_a_format_of_ours(name: str) -> None:
    if name in VLLM_TOOL_PARSERS or name in TOOL_FORMATS:
        chosen = ReplyFormats.choose("", tools=name, reasoning="off").tools
        assert chosen == VLLM_TOOL_PARSERS.get(name, name)
        assert chosen in TOOL_FORMATS
    if name in VLLM_REASONING_PARSERS or name in REASONING_FORMATS:
        chosen = ReplyFormats.choose("", tools="off", reasoning=name).reasoning
        assert chosen == VLLM_REASONING_PARSERS.get(name, name)
        assert chosen in (*REASONING_FORMATS, HARMONY)


@cases(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<think>\\n' }}...split('</think>')", None, "think"),
        ("[THINK]{{ thinking }}[/THINK]", None, "mistral"),
        ("'<|channel>thought\\n<channel|>'", None, "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", *["harmony"] * 2),
        ("{{ content }}", None, None),
        ("List of tools: <|tool_list_start|>[", "lfm2", None),
        ("{%- set dsml_token = '｜DSML｜' -%}<' + dsml_token + 'tool_calls>", "deepseek_v4", None),
        ("dsml_token = '｜DSML｜'\n'<' + dsml_token + 'function_calls>'", "deepseek_v32", None),
        ("'<|open|>' + tag '<|sep|>' '<|close|>' + tag", "kimi_k3", "kimi_k3"),
        ("<tool_calls>[{\"name\": <think></think> '<answer>\\n'", "jamba", "think_answer"),
        ("<tool_calls>\\n", "minimax_m1", None),
        ("respond only with <|tool_call|> followed by", "granite3", None),
        ("between <think></think> and <response></response>", None, "think_response"),
        ("<minimax:tool_call> </think> '\\n<response>' }}", "minimax_m2", "think"),
        ("<|start|>assistant to=self<|message|><|eom|><atem:function_calls>", *["muse_spark"] * 2),
        ("<|header_start|> {\"name\": f, \"parameters\": {}}", "llama3", None),
    ],
)  # fmt: skip
def test_a_template_is_known_by_what_only_its_family_writes(
    template: str, tools: str | None, reasoning: str | None
) -> None:
    assert ReplyFormats.choose(template) == ReplyFormats(tools, reasoning)


def test_the_models_own_tokens_say_it_where_the_template_does_not() -> None:
    tokens = {"<|tool_call_start|>", "<|tool_call_end|>", "<|im_end|>"}
    assert ReplyFormats.choose("{% for tool in tools %}", tokens=tokens).tools == "lfm2"
    assert ReplyFormats.choose("{{ messages }}", tokens=tokens).tools is None
    assert ReplyFormats.choose("{{ tools }}<tool_call>", tokens=tokens).tools == "hermes"
