"""Grammars of calls where a format's marks are special tokens, as they are in its own models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from qwen35_server import ARGUMENTS, TEXT, WEATHER
from tokenizers import decoders, models, pre_tokenizers

from call_texts import write_calls
from cases import cases
from pippin.api.dialects.chat_completions import parse_chat
from pippin.api.grammar import can_forbid_calls, constrain
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.config import LimitsConfig
from pippin.decode.compile import compile_grammar
from pippin.engine.grammar_zygote import vocabulary_of
from pippin.text.bundle import SamplingDefaults
from pippin.text.parsers.formats import REASONING_FORMATS, ReplyFormats
from pippin.text.prompt import Prompt
from pippin.text.tokenizer import Tokenizer
from pippin.types import GrammarSpec

END = "<|end_of_reply|>"
_FIXTURE = Path(__file__).parents[1] / "fixtures/family_replies.jsonl"
_HEADER, *RECORDED = map(json.loads, _FIXTURE.read_text(encoding="utf-8").splitlines())
RECORDED_TOOLS = _HEADER["tools"]
MODEL = ModelInfo(name="m", max_len=1000, vocab_size=1000, created_s=1)
# Formats whose calls begin with a mark that is one token in the family's models.
MARKED = {
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": ("<|tools_prefix|>", "<|tools_suffix|>"),
    "granite3": ("<|tool_call|>",),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "nemotron_h": ("<TOOLCALL>", "</TOOLCALL>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
}
HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    *("<|call|>", "<|return|>"),
)


@cache
def tokenizer_with(*marks: str, ends: tuple[str, ...] = (END,)) -> Tokenizer:
    """One token for each byte, and the marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    added = list(dict.fromkeys((*marks, *ends)))
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in added])
    ids = {mark: backend.token_to_id(mark) for mark in added}
    return Tokenizer(
        backend,
        eos_ids=tuple(ids[end] for end in ends),
        special_ids=frozenset(ids.values()),
    )


def tool(name: str, *, strict: bool = True) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": WEATHER, "strict": strict}}


class Checker:
    """Which replies a request's grammar allows."""

    def __init__(self, tokenizer: Tokenizer, formats: ReplyFormats, ending: str, **fields: Any):
        self.text = replace(TEXT, tokenizer=tokenizer, formats=formats)
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], **fields}
        rules = RequestRules(MODEL, SamplingDefaults(), LimitsConfig())
        params = constrain(parse_chat(body, rules), Prompt([1], ending=ending), self.text)
        assert params.ebnf is not None
        vocabulary = vocabulary_of(tokenizer, tokenizer._backend.get_vocab_size())
        self.grammar = compile_grammar(GrammarSpec("ebnf", params.ebnf), vocabulary)

    def allows(self, reply: str) -> bool:
        tokens = self.text.tokenizer.encode(reply, add_special_tokens=False)
        if tokens[-1] not in self.text.tokenizer.eos_ids:
            tokens.append(self.text.tokenizer.eos_ids[0])
        return self.grammar._matcher.validate_tokens(tokens) == len(tokens)


@cases("format", MARKED)
def test_strict_calls_are_optional_where_a_mark_begins_them(format: str) -> None:
    tokenizer = tokenizer_with(*MARKED[format])
    good = write_calls(format, [("look", ARGUMENTS), ("look", {"city": "Rome"})])
    bad = write_calls(format, [("look", {"days": 3})])
    free = Checker(tokenizer, ReplyFormats(format), "", tools=[tool("look")])
    assert free.allows("It rains.")
    assert free.allows(good)
    assert free.allows(f"Let me look.\n{good}")
    assert not free.allows(bad)
    required = Checker(
        tokenizer, ReplyFormats(format), "", tools=[tool("look")], tool_choice="required"
    )
    assert required.allows(good)
    assert not required.allows("It rains.")
    assert can_forbid_calls(free.text)
    none = Checker(tokenizer, ReplyFormats(format), "", tools=[tool("look")], tool_choice="none")
    assert none.allows("It rains.")
    assert not none.allows(good)


@cases("name", [name for name in REASONING_FORMATS if name != "muse_spark"])
def test_calls_are_constrained_behind_a_familys_reasoning(name: str) -> None:
    marks = REASONING_FORMATS[name]
    ends = re.findall(r"<[^>]+>|\[/?THINK\]", marks.begin + marks.end)
    checker = Checker(
        tokenizer_with(*ends, "<tool_call>", "</tool_call>"),
        ReplyFormats("hermes", name),
        marks.begin,
        tools=[tool("look")],
        tool_choice="required",
    )
    call = write_calls("hermes", [("look", ARGUMENTS)])
    assert checker.allows(f"Hm.{marks.end}\n{call}")
    assert not checker.allows(f"Hm.{marks.end}\nIt rains.")


# ---- what families' templates wrote ----------------------------------------------------------

PYTHON = "values as Python prints them"
# What a grammar makes the model write is read the same, but is not to the letter what these write.
OTHERWISE = {
    "ByteDance-Seed/Seed-OSS-36B-Instruct": PYTHON,
    "LiquidAI/LFM2.5-8B-A1B": PYTHON,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": PYTHON,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": PYTHON,
    "openbmb/MiniCPM5-1B": PYTHON,
    "vllm/tool_chat_template_llama3.2_pythonic": PYTHON,
    "vllm/tool_chat_template_llama4_pythonic": PYTHON,
    "vllm/tool_chat_template_functiongemma": PYTHON,
    "google/gemma-4-31B-it": "keys in the order of the alphabet",
    "vllm/tool_chat_template_granite": "indented JSON",
    "vllm/tool_chat_template_llama4_json": "no semicolon between calls",
    "mistralai/Mistral-Nemo-Instruct-2407": "ids of calls",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "ids of calls",
    "openai/gpt-oss-120b": "the recipient before the channel",
    "llama.cpp/muse-glimmer": "a message for each call",
}


@cases("strict", [False, True])
@cases("recorded", RECORDED, ids=lambda each: each["template"])
def test_a_required_call_may_be_what_the_familys_template_wrote(
    recorded: dict[str, Any], strict: bool
) -> None:
    tools = [
        {**each, "function": {**each["function"], "strict": strict}} for each in RECORDED_TOOLS
    ]
    formats = ReplyFormats(recorded["tools"], recorded["reasoning"])
    marks = formats.parser(recorded["prompt_end"], tools).marks
    tokens = sorted(mark for mark in marks if re.fullmatch(r"<[^<>]+>|\[/?[A-Z_]+\]", mark))
    checker = Checker(
        *(tokenizer_with(*tokens), formats, recorded["prompt_end"]),
        tools=tools,
        tool_choice="required",
    )
    is_allowed = checker.allows(recorded["reply"].rstrip())
    assert is_allowed is (recorded["template"] not in OTHERWISE)


# ---- harmony ---------------------------------------------------------------------------------

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>It rains."
CALL = (
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    '{"city": "Tokyo", "days": 3}<|call|>'
)
BAD_CALL = CALL.replace('"city": "Tokyo", ', "")


def harmony(**fields: Any) -> Checker:
    tokenizer = tokenizer_with(*HARMONY_MARKS, ends=("<|return|>", "<|call|>"))
    formats = ReplyFormats("harmony", "harmony")
    return Checker(tokenizer, formats, "<|end|><|start|>assistant", **fields)


def test_harmonys_calls_can_be_required() -> None:
    checker = harmony(tools=[tool("look")], tool_choice="required")
    for before in ("", THOUGHT, THOUGHT + PREAMBLE, PREAMBLE + THOUGHT):
        assert checker.allows(before + CALL)
        assert not checker.allows(before + ANSWER)
        assert not checker.allows(before + BAD_CALL)
    assert not checker.allows(CALL.replace("look", "leap"))


def test_harmonys_strict_calls_are_optional() -> None:
    checker = harmony(tools=[tool("look")])
    assert checker.allows(THOUGHT + ANSWER)
    assert checker.allows(THOUGHT + CALL)
    assert not checker.allows(THOUGHT + BAD_CALL)
    assert not checker.allows("It rains.")


def test_harmonys_calls_can_be_forbidden() -> None:
    checker = harmony(tools=[tool("look")], tool_choice="none")
    assert can_forbid_calls(checker.text)
    assert checker.allows(THOUGHT + ANSWER)
    assert not checker.allows(THOUGHT + CALL)


def test_a_schema_holds_for_harmonys_final_message_alone() -> None:
    schema = {"name": "s", "schema": WEATHER, "strict": True}
    for more in ({}, {"tools": [tool("look")]}):
        checker = harmony(response_format={"type": "json_schema", "json_schema": schema}, **more)
        good = ANSWER.replace("It rains.", '{"city": "Rome"}')
        assert checker.allows(THOUGHT + good)
        assert not checker.allows(THOUGHT + ANSWER)
        assert checker.allows(THOUGHT + CALL) is bool(more)


def test_what_harmonys_grammar_allows_is_read_back() -> None:
    parser = ReplyFormats("harmony", "harmony").parser("", [tool("look")])
    pieces = [*parser.feed(THOUGHT + PREAMBLE + CALL.removesuffix("<|call|>")), *parser.close()]
    folded = [piece for piece in pieces if hasattr(piece, "name")]
    assert [piece.name for piece in folded] == ["look"]
