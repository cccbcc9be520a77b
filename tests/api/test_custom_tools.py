"""Custom tools: calls whose argument is one text, held to a grammar, in OpenAI's two dialects."""

from __future__ import annotations

import itertools
import json
from typing import Any

import openai
import pytest
from qwen35_server import (
    TEXT,
    THOUGHT,
    allows,
    openai_client,
    prompt_text,
    says,
    vocabulary,
)

from call_texts import write_calls
from cases import cases
from pippin.api.grammar import CallRules, Lark
from pippin.api.requests.neutral_request import ToolUse
from pippin.api.requests.tools import InputReader, arguments_of, as_function, input_of
from pippin.decode.compile import CompiledGrammar, compile_grammar, prove_grammar
from pippin.errors import RequestError, UnsupportedField
from pippin.text.parsers.formats import TOOL_FORMATS
from pippin.types import GrammarPart, GrammarSpec

# As OpenAI's guide and Codex have them.
ARITHMETIC = """
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: INT
SP: " "
ADD: "+"
%import common.INT
"""
PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
%import common.LF
"""
PATCHES = "*** Begin Patch\n*** Add File: a.py\n+print(1)\n+\n*** Delete File: b\n*** End Patch"
TIMESTAMP = r"^\d{4}-\d{2}-\d{2}( at \d\d:\d\d)?$"
ODD = 'a "b" \\ \n\n{"c": [1]}\t😀 é </para> <'


def call_of(name: str, input: str) -> str:
    return write_calls("qwen3_coder", [(name, {"input": input})])


# ---- the text out of the arguments -----------------------------------------------------------


@pytest.mark.parametrize("ascii", [True, False])
def test_an_input_is_read_out_of_its_arguments_however_they_come(ascii: bool) -> None:
    arguments = json.dumps({"input": ODD}, ensure_ascii=ascii)
    for first, second in itertools.combinations(range(len(arguments) + 1), 2):
        reader = InputReader()
        parts = (arguments[:first], arguments[first:second], arguments[second:])
        assert "".join(map(reader.feed, parts)) + reader.close() == ODD


def test_an_input_is_passed_on_while_it_comes() -> None:
    reader = InputReader()
    assert reader.feed('{"input": "abc\\') == "abc"
    assert reader.feed("ndef\\ud83d") == "\ndef"
    assert reader.feed('\\ude00"}') == "😀"
    assert reader.close() == ""


@pytest.mark.parametrize("arguments", ['{"code": "x"}', "{}", '{"input": 5}', '{"inputs": "x"}'])
def test_other_arguments_are_the_input_as_they_are(arguments: str) -> None:
    assert input_of(arguments) == arguments


def test_half_a_pair_is_no_character() -> None:
    assert input_of('{"input": "a\\ud83d b"}') == "a\ufffd b"
    assert input_of(arguments_of(ODD)) == ODD


# ---- held to a grammar -----------------------------------------------------------------------


def grammar_of(format: str, grammar: GrammarPart | None) -> CompiledGrammar:
    lark = Lark(TEXT.tokenizer)
    use = ToolUse((as_function("run", None, grammar),), required=True, custom={"run": grammar})
    text = lark.text(CallRules(lark, format, use).calls())
    return compile_grammar(GrammarSpec("ebnf", text), vocabulary())


def written(format: str, input: str) -> str:
    return write_calls(format, [("run", {"input": input})])


BARE = ("qwen3_coder", "glm", "minimax_m2", "gemma4", "function_gemma")
CONSTRAINED = [name for name in TOOL_FORMATS if name != "harmony"]


@cases("format", BARE)
@cases(
    ("definition", "good", "bad"),
    [
        (ARITHMETIC, ["1", "1 + 22 + 3"], ["1 +", "1+2", "a", ""]),
        (ARITHMETIC + '%ignore "\\n"\n', ["1", "1 + 2"], ["1 +", "x"]),
        (PATCH, [PATCHES, PATCHES + "\n"], [PATCHES[:-5], "*** Begin Patch\n*** End Patch"]),
        ('start: "::=" | "}" | "<tool>"', ["::=", "}", "<tool>"], ["{"]),
    ],
)
def test_a_lark_grammar_is_kept_where_inputs_stand_bare(
    format: str, definition: str, good: list[str], bad: list[str]
) -> None:
    grammar = grammar_of(format, GrammarPart("lark", definition, "tools[0].format.definition"))
    assert [allows(grammar.copy(), written(format, text)) for text in good] == [True] * len(good)
    assert not any(allows(grammar.copy(), written(format, text)) for text in bad)


@cases("format", CONSTRAINED)
def test_a_regular_expression_is_kept_in_every_format(format: str) -> None:
    grammar = grammar_of(format, GrammarPart("regex", TIMESTAMP, "f"))
    for good in ("2026-01-01", "2026-01-01 at 07:30"):
        assert allows(grammar.copy(), written(format, good))
    for bad in ("2026-1-1", "2026-01-01 at", "2026-01-01\n", ""):
        assert not allows(grammar.copy(), written(format, bad))
    lines = grammar_of(format, GrammarPart("regex", r'(?s:"?a.*)', "f"))
    assert allows(lines.copy(), written(format, 'a\n"b"\n\nc'))
    assert allows(lines.copy(), written(format, '"a'))
    assert not allows(lines.copy(), written(format, "b"))


@cases("format", CONSTRAINED)
def test_an_input_without_a_grammar_is_any_text(format: str) -> None:
    grammar = grammar_of(format, None)
    assert allows(grammar.copy(), written(format, ODD))
    other = write_calls(format, [("run", {"code": "x"})])
    assert not allows(grammar.copy(), other)


def test_a_lark_grammar_inside_of_a_json_string_is_refused() -> None:
    with pytest.raises(UnsupportedField, match="hermes an input is written as a JSON"):
        grammar_of("hermes", GrammarPart("lark", ARITHMETIC, "tools[0].format.definition"))


# ---- with the official client ----------------------------------------------------------------


def lark(definition: str = ARITHMETIC) -> dict[str, Any]:
    return {"type": "grammar", "syntax": "lark", "definition": definition}


def respond(client: Any, **fields: Any) -> Any:
    tool = {"type": "custom", "name": "run", "description": "Adds.", "format": lark()}
    asked = {"model": "qwen", "input": "Add 1 and 2.", "tools": [tool]} | fields
    return client.responses.create(**asked)


def test_a_response_calls_a_custom_tool_and_takes_its_output(obeys: Any) -> None:
    with openai_client(says(THOUGHT + call_of("run", "1 + 2")), says("3")) as (client, engine):
        first = respond(client)
        (call,) = [item for item in first.output if item.type == "custom_tool_call"]
        assert (call.name, call.input, call.status) == ("run", "1 + 2", "completed")
        shown = prompt_text(engine)
        assert "Adds." in shown
        assert "this Lark grammar" in shown
        assert obeys(engine, THOUGHT + call_of("run", "1 + 2"))
        assert obeys(engine, f"{THOUGHT}It is 3.")
        assert not obeys(engine, THOUGHT + call_of("run", "1 plus 2"))
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "3"}
        respond(client, input=[output], previous_response_id=first.id)
    assert call_of("run", "1 + 2") in prompt_text(engine)
    assert "<tool_response>\n3\n</tool_response>" in prompt_text(engine)


def test_a_stream_tells_the_input_as_it_comes() -> None:
    with openai_client(says(THOUGHT + call_of("run", ODD))) as (client, _):
        tool = {"type": "custom", "name": "run", "format": {"type": "text"}}
        events = list(respond(client, stream=True, tools=[tool]))
    kind = "response.custom_tool_call_input"
    deltas = [event.delta for event in events if event.type == f"{kind}.delta"]
    (done,) = [event for event in events if event.type == f"{kind}.done"]
    assert len(deltas) > 5
    assert "".join(deltas) == done.input == events[-1].response.output[-1].input == ODD


CHAT_GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r"\d+"}}


def chat(client: Any, **fields: Any) -> Any:
    tool = {"type": "custom", "custom": {"name": "run", "format": CHAT_GRAMMAR}}
    asked = {
        "model": "qwen",
        "messages": [{"role": "user", "content": "Count."}],
        "tools": [tool],
        "tool_choice": {"type": "custom", "custom": {"name": "run"}},
    }
    return client.chat.completions.create(**asked | fields)


def test_a_chat_calls_a_custom_tool(obeys: Any) -> None:
    with openai_client(says(THOUGHT + call_of("run", "12")), says("Yes.")) as (client, engine):
        message = chat(client).choices[0].message
        (call,) = message.tool_calls
        assert (call.type, call.custom.name, call.custom.input) == ("custom", "run", "12")
        assert obeys(engine, THOUGHT + call_of("run", "7"))
        assert not obeys(engine, THOUGHT + call_of("run", "x"))
        assert not obeys(engine, f"{THOUGHT}Seven.")
        sent = message.model_dump(exclude_none=True)
        result = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
        user = {"role": "user", "content": "Count."}
        chat(client, messages=[user, sent, result], tool_choice="auto")
    assert call_of("run", "12") in prompt_text(engine)


def test_a_streamed_chat_tells_the_input_as_it_comes() -> None:
    with openai_client(says(THOUGHT + call_of("run", "12 and more"))) as (client, _):
        tool = {"type": "custom", "custom": {"name": "run"}}
        chunks = list(chat(client, stream=True, tools=[tool]))
    calls = [
        call for chunk in chunks for call in chunk.choices[0].delta.to_dict().get("tool_calls", ())
    ]
    assert calls[0]["type"] == "custom"
    assert calls[0]["custom"] == {"name": "run", "input": ""}
    assert "".join(call["custom"]["input"] for call in calls) == "12 and more"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_of_a_namespace_are_called_by_both_names() -> None:
    inner = [{"type": "custom", "name": "run"}, *tools("stop")]
    space = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": inner}
    call = write_calls("qwen3_coder", [("agents.stop", {}), ("agents.run", {"input": "a"})])
    with openai_client(says(THOUGHT + call), says("Ok.")) as (client, engine):
        first = respond(client, tools=[space, *tools("stop")])
        stop, run = first.output[1:]
        assert (stop.type, stop.namespace, stop.name) == ("function_call", "agents", "stop")
        assert (run.type, run.namespace, run.name, run.input) == (
            "custom_tool_call", "agents", "run", "a",
        )  # fmt: skip
        output = {"type": "function_call_output", "call_id": stop.call_id, "output": "ok"}
        respond(client, input=[output], previous_response_id=first.id)
    assert call in prompt_text(engine)
    assert "Helpers." in prompt_text(engine, 0)


# ---- some of the tools -------------------------------------------------------------------------


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_tools_that_are_allowed_are_called_and_all_are_shown(obeys: Any, mode: str) -> None:
    allowed = [{"type": "function", "name": "a"}, {"type": "function", "name": "b"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    calls = {name: THOUGHT + write_calls("qwen3_coder", [(name, {})]) for name in "abc"}
    with openai_client(says(calls["a"])) as (client, engine):
        respond(client, tools=tools("a", "b", "c"), tool_choice=choice)
    assert '"name": "c"' in prompt_text(engine)
    assert obeys(engine, calls["a"])
    assert obeys(engine, calls["b"])
    assert not obeys(engine, calls["c"])
    assert obeys(engine, f"{THOUGHT}No.") is (mode == "auto")


def custom(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "custom", "name": "f", **fields}]}


@cases(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        (custom(name="a b"), "tools[0].name"),
        (custom(format="text"), "tools[0].format"),
        (custom(format={}), "tools[0].format.type"),
        (custom(format=lark('start: "a"{9999999}')), "tools[0].format.definition"),
        (custom(format=lark() | {"syntax": "peg"}), "tools[0].format.syntax"),
        ({"tool_choice": {"type": "custom", "name": "g"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with openai_client(says("")) as (client, _), pytest.raises(openai.BadRequestError) as caught:
        respond(client, **fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("definition", "syntax"),
    [
        ("start: x", "lark"),
        ('start: "a" }\nb: {', "lark"),
        ("(?=a)b", "regex"),
        ("a)|(b", "regex"),
    ],
)
def test_a_definition_that_is_no_grammar_by_itself_is_found_out_where_it_is_compiled(
    definition: str, syntax: str
) -> None:
    with openai_client(says("")) as (client, engine):
        respond(client, **custom(format=lark(definition) | {"syntax": syntax}))
    spec = engine.submits[-1].params.grammar
    assert spec is not None
    with pytest.raises(RequestError) as caught:
        prove_grammar(spec, vocabulary())
    assert caught.value.param == "tools[0].format.definition"


def test_nothing_is_compiled_where_requests_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the server along: a chain of 5,000 rules overflows a compiler's stack."""

    def compiled(*_: Any, **__: Any) -> None:
        raise AssertionError("the process of the server compiled a grammar")

    class NoMatcher:
        __init__ = validate_grammar = validate_grammar_with_warnings = compiled

    monkeypatch.setattr("pippin.decode.json_schema.LLMatcher", NoMatcher)
    with openai_client(says("")) as (client, engine):
        respond(client, **custom(format=lark()))
        respond(client, **custom(format=lark("(") | {"syntax": "regex"}))
    assert len(engine.submits) == 2
