"""Replies of each family as its chat template writes them: whole, and cut in two at every place."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from cases import cases
from pippin.text.lexer import Lexer
from pippin.text.parsers.formats import TOOL_FORMATS, ReplyFormats
from pippin.text.pieces import CallEnd, FoldedText, TextPiece, joined

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "tree": {"type": "object"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("get_weather", "f")
]
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
REPLIES = {
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


@cases("family", REPLIES)
def test_a_familys_reasoning_and_calls_are_found_wherever_its_reply_is_cut(family: str) -> None:
    tools, reasoning, prompt, reply = REPLIES[family]
    formats = ReplyFormats(tools, reasoning)
    folded = fold(formats, prompt, reply)
    assert calls_in(folded) == CALLS
    assert (folded.content, folded.reasoning) == ("", "Hm.")
    whole = parse(formats, prompt, reply)
    assert parse(formats, prompt, *reply) == whole
    for at in range(1, len(reply)):
        assert parse(formats, prompt, reply[:at], reply[at:]) == whole, reply[:at]


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
    whole = parse(formats, prompt, text, tools=tools)
    for at in range(1, len(text)):
        assert parse(formats, prompt, text[:at], text[at:], tools=tools) == whole


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


# ---- slips, and what is no call --------------------------------------------------------------


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
    folded = fold(ReplyFormats(format), "", text)
    assert (calls_in(folded), folded.content) == ([("f", arguments)], "")


@cases(
    ("format", "text"),
    [
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
def test_what_is_no_call_is_content(format: str, text: str) -> None:
    folded = fold(ReplyFormats(format), "", text)
    assert (folded.content, calls_in(folded)) == (text, [])


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


# ---- which format a template speaks ----------------------------------------------------------


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
