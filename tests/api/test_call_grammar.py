"""Calls of every format that can be constrained: a grammar allows them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from qwen35_server import ARGUMENTS, TEXT, WEATHER, allows, vocabulary

from call_texts import write_calls
from cases import cases
from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.grammar import CallRules, Lark, constrain
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Leniency
from pippin.api.requests.neutral_request import ToolUse
from pippin.config import LimitsConfig
from pippin.decode.compile import CompiledGrammar, compile_grammar
from pippin.errors import RequestError, UnsupportedField
from pippin.text.bundle import SamplingDefaults
from pippin.text.parsers.formats import TOOL_FORMATS, ReplyFormats
from pippin.text.prompt import Prompt
from pippin.types import GrammarSpec

BARE_KEYS = ("gemma4", "function_gemma")
CONSTRAINED = [name for name in TOOL_FORMATS if name != "harmony"]  # tested with its own marks
MODEL = ModelInfo(name="qwen", max_len=1000, vocab_size=248_320, created_s=1)


def tool(name: str, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, "strict": strict}}


def grammar_of(format: str, tool_use: ToolUse) -> CompiledGrammar:
    lark = Lark(TEXT.tokenizer)
    text = lark.text(CallRules(lark, format, tool_use).calls())
    return compile_grammar(GrammarSpec("ebnf", text), vocabulary())


def calls(format: str, *names: str, **arguments: Any) -> str:
    given = ARGUMENTS | arguments
    return write_calls(format, [(name, given) for name in names])


@cases("strict", [False, True])
@cases("format", CONSTRAINED)
def test_a_grammar_allows_the_formats_calls(format: str, strict: bool) -> None:
    tools = (tool("look", strict=strict), tool("go", strict=strict))
    grammar = grammar_of(format, ToolUse(tools, required=True))
    assert allows(grammar, calls(format, "look"))
    assert allows(grammar, calls(format, "go", "look"))
    assert not allows(grammar, calls(format, "run"))
    assert not allows(grammar, "It rains.")
    assert not allows(grammar, calls(format, "look", days="three"))
    one = grammar_of(format, ToolUse(tools, required=True, only=frozenset({"go"}), parallel=False))
    assert allows(one, calls(format, "go"))
    assert not allows(one, calls(format, "look"))
    assert not allows(one, calls(format, "go", "go"))


@cases("format", CONSTRAINED)
def test_a_required_call_whose_schema_cannot_be_enforced_is_any_call(format: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "minProperties": 5}
    function = {"name": "look", "parameters": schema}
    use, leniency = (
        ToolUse(({"type": "function", "function": function},), required=True),
        Leniency(),
    )
    lark = Lark(TEXT.tokenizer)
    text = lark.text(CallRules(lark, format, use, leniency).calls())
    grammar = compile_grammar(GrammarSpec("ebnf", text), vocabulary())
    assert allows(grammar, calls(format, "look", days="three"))
    assert leniency.header() == "tools.parameters (look)"
    strict = {"type": "function", "function": function | {"strict": True}}
    with pytest.raises(UnsupportedField, match="minProperties is 5"):
        grammar_of(format, ToolUse((strict,), required=True))


def test_a_required_call_obeys_what_is_left_of_its_schema_unless_it_is_strict() -> None:
    days = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": days}}
    function = {"name": "look", "parameters": schema}
    leniency, lark = Leniency(), Lark(TEXT.tokenizer)
    use = ToolUse(({"type": "function", "function": function},), required=True)
    text = lark.text(CallRules(lark, "hermes", use, leniency).calls())
    grammar = compile_grammar(GrammarSpec("ebnf", text), vocabulary())
    assert allows(grammar, calls("hermes", "look", days=[1, 1]))
    assert not allows(grammar, calls("hermes", "look", days=["a"]))
    assert leniency.header() == "tools.parameters.uniqueItems (look)"
    assert function["parameters"] == schema  # the model is shown all of it
    strict = {"type": "function", "function": function | {"strict": True}}
    with pytest.raises(UnsupportedField, match="uniqueItems is not supported"):
        grammar_of("hermes", ToolUse((strict,), required=True))


def test_required_calls_of_schemas_that_are_too_large_together_are_any_calls() -> None:
    tools = [tool(f"f{i}") for i in range(20)]
    fields = {"tools": tools, "tool_choice": "required"}
    small, large = (constrained(fields, TEXT.formats, max_schema_bytes=n) for n in (6000, 60_000))
    assert "days" not in str(small)
    assert "days" in str(large)


TREE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "size": {"type": ["integer", "null"], "minimum": 0},
        "leaves": {"type": "array", "items": {"$ref": "#/$defs/leaf"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    },
    "required": ["leaves"],
    "$defs": {
        "leaf": {
            "type": "object",
            "properties": {"kind": {"const": "x"}, "more": {"$ref": "#/$defs/leaf"}},
            "required": ["kind"],
        }
    },
}  # fmt: skip


@cases("format", BARE_KEYS)
@cases(
    ("arguments", "obeys"),
    [
        ({"leaves": []}, True),
        ({"name": "a", "size": 3, "leaves": [{"kind": "x"}, {"kind": "x"}], "note": "oh"}, True),
        ({"size": None, "leaves": [{"kind": "x", "more": {"kind": "x"}}], "note": True}, True),
        ({"name": "c", "leaves": []}, False),
        ({"size": -1, "leaves": []}, False),
        ({"leaves": [{"kind": "y"}]}, False),
        ({"leaves": [], "note": 5}, False),
        ({"leaves": [], "other": 5}, False),
        ({"name": "a"}, False),
    ],
)
def test_strict_arguments_with_bare_keys(
    format: str, arguments: dict[str, Any], obeys: bool
) -> None:
    function = {"name": "f", "parameters": TREE, "strict": True}
    use = ToolUse(({"type": "function", "function": function},), required=True)
    text = write_calls(format, [("f", arguments)])
    assert allows(grammar_of(format, use), text) is obeys


def test_what_bare_keys_cannot_keep_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}}
    function = {"name": "f", "parameters": schema, "strict": True}
    use = ToolUse(({"type": "function", "function": function},), required=True)
    with pytest.raises(UnsupportedField, match="f: minLength of a, in the format gemma4"):
        grammar_of("gemma4", use)


def constrained(fields: dict[str, Any], formats: ReplyFormats, **limits: Any) -> str | None:
    body = {"model": "qwen", "messages": [{"role": "user", "content": "Hi."}], **fields}
    request = parse_chat(body, RequestRules(MODEL, SamplingDefaults(), LimitsConfig(**limits)))
    text = replace(TEXT, formats=formats)
    return constrain(request, Prompt([1], ending="<think>\n"), text).ebnf


def test_a_format_without_a_first_mark_is_free_or_required() -> None:
    llama = ReplyFormats(tools="llama3")
    tools = [tool("look", strict=True)]
    assert constrained({"tools": tools, "tool_choice": "required"}, llama)
    with pytest.raises(UnsupportedField, match="only if one is required"):
        constrained({"tools": tools}, llama)


@pytest.mark.parametrize("field", [{"regex": "a"}, {"ebnf": 'root ::= "a"'}])
def test_expressions_do_not_combine_with_open_reasoning(field: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedField, match="reasons first"):
        constrained(field, ReplyFormats(reasoning="think"))
    assert constrained(field, ReplyFormats()) == field.get("ebnf")


def test_a_grammar_of_tools_is_no_larger_than_allowed() -> None:
    tools = [tool(f"f{i}", strict=True) for i in range(20)]
    with pytest.raises(RequestError, match="--max-schema-bytes"):
        constrained({"tools": tools}, TEXT.formats, max_schema_bytes=1000)
