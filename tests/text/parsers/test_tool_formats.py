"""Each format as models write it, with the slips that they are known for."""

from __future__ import annotations

import importlib
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
    Content,
    FoldedText,
    TextPiece,
    joined,
)

WEATHER = ("get_weather", {"text": "Tokyo"})


def parse(format: str, text: str, tools: Any = TOOLS) -> list[TextPiece]:
    parser = TOOL_FORMATS[format].parser(tools)
    return joined([*parser.feed(text), *parser.close()])


def fold(format: str, text: str, tools: Any = TOOLS) -> tuple[str, list[Call]]:
    folded = FoldedText.of(parse(format, text, tools))
    calls = [(call.name, json.loads(call.arguments)) for call in folded.calls.values()]
    return folded.content, calls


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
    assert fold(format, text) == (content, calls)


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
    assert fold("qwen3_coder", qwen(body)) == ("", [("get_weather", arguments)])


def test_qwens_calls_need_not_be_wrapped() -> None:
    text = qwen("<parameter=text>\nTokyo\n</parameter>\n").removeprefix("<tool_call>\n")
    assert fold("qwen3_coder", f"Hm. {text}") == ("Hm.", [WEATHER])


def test_the_end_of_a_reply_ends_what_it_may() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=text>\nTokyo\n</function>\n"
    assert fold("qwen3_coder", text) == ("", [WEATHER])


def test_nothing_of_a_good_call_leaks_when_the_next_one_is_bad() -> None:
    array = '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": 5}]'
    assert fold("mistral", array) == (', {"name": 5}]', [("f", {})])
    listed = '{"name": "get_weather", "parameters": {"text": "Tokyo"}}; {"name": "unknown"}'
    assert fold("llama3", listed) == ('; {"name": "unknown"}', [WEATHER])


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
    ],
)
def test_what_cannot_be_parsed_is_content(format: str, text: str) -> None:
    assert fold(format, text) == (text, [])


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
    ((_, arguments),) = fold(format, allowed)[1]
    assert depth_of(arguments) == MAX_ARGUMENTS_DEPTH
    for _, arguments in fold(format, refused)[1]:
        assert depth_of(arguments["value"]) <= MAX_ARGUMENTS_DEPTH


def test_an_answer_in_json_is_not_held_back_as_a_call() -> None:
    parser = TOOL_FORMATS["llama3"].parser(TOOLS)
    assert joined(parser.feed('{"answer": [1, 2, ')) == [Content('{"answer": [1, 2,')]


def test_a_call_of_kimis_keeps_the_id_that_the_model_gave_it() -> None:
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:3"
        '<|tool_call_argument_begin|>{"text": "Tokyo"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    assert parse("kimi_k2", text)[0] == CallBegin(0, "functions.get_weather:3", "get_weather")


@pytest.mark.parametrize(
    ("format", "pattern"), [("mistral", r"[A-Za-z0-9]{9}"), ("hermes", r"call_[0-9a-f]{24}")]
)
def test_calls_get_ids_that_the_template_will_take_back(format: str, pattern: str) -> None:
    text = write_calls(format, [WEATHER, WEATHER])
    ids = [piece.id for piece in parse(format, text) if isinstance(piece, CallBegin)]
    assert len(set(ids)) == 2
    assert all(re.fullmatch(pattern, id) for id in ids)


def test_harmony_tells_reasoning_calls_and_content_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm, weather.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"text": "Tokyo"}<|call|>'
        "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    )
    folded = FoldedText.of(parse("harmony", text))
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
        assert fold(format, text) == ("", [(found["name"], found["arguments"])])


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
