"""The formats by name, and which of them a model's chat template speaks. Knows no replies."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pippin.errors import ConfigError
from pippin.text.parsers.base import CallParser, PlainText, ReplyParser, Tool
from pippin.text.parsers.calls.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from pippin.text.parsers.calls.gemma import FunctionGemmaParser, Gemma4Parser
from pippin.text.parsers.calls.glm import Glm47Parser, GlmParser, LongCatParser
from pippin.text.parsers.calls.harmony import HarmonyParser
from pippin.text.parsers.calls.kimi_k2 import KimiK2Parser
from pippin.text.parsers.calls.llama3 import Llama3Parser
from pippin.text.parsers.calls.marked_json import (
    ApertusParser,
    CohereParser,
    Granite3Parser,
    HermesParser,
    JambaParser,
    MiniMaxM1Parser,
    NemotronHParser,
    Phi4MiniParser,
)
from pippin.text.parsers.calls.mistral import MistralArrayParser, MistralParser
from pippin.text.parsers.calls.pythonic import BarePythonicParser, Lfm2Parser, Olmo3Parser
from pippin.text.parsers.calls.qwen3_coder import Qwen3CoderParser, SeedOssParser
from pippin.text.parsers.calls.tags_with_attributes import (
    DeepSeekV4Parser,
    DeepSeekV32Parser,
    KimiK3Parser,
    MiniCpm5Parser,
    MiniMaxM2Parser,
    MuseSparkParser,
)
from pippin.text.parsers.reasoning import ReasoningMarks, ReasoningParser

AUTO, OFF = "auto", "off"
HARMONY = "harmony"  # one parser for reasoning and calls


@dataclass(frozen=True)
class ToolFormat:
    parser: type[CallParser]
    template_marks: tuple[str, ...]  # a chat template with all of them speaks it
    other_marks: tuple[str, ...] = ()  # and so does one with all of these
    tokens: tuple[str, ...] = ()  # and, if its template has no format's marks, a model with these

    def speaks(self, template: str) -> bool:
        return any(
            marks and all(mark in template for mark in marks)
            for marks in (self.template_marks, self.other_marks)
        )


_LFM2_TOKENS = ("<|tool_call_start|>", "<|tool_call_end|>")
# The first whose marks are all there is the template's: the particular before the general.
TOOL_FORMATS = {
    "harmony": ToolFormat(HarmonyParser, ("<|channel|>", "<|message|>")),
    "minimax_m2": ToolFormat(MiniMaxM2Parser, ("<minimax:tool_call>",)),
    "muse_spark": ToolFormat(MuseSparkParser, ("<atem:function_calls>",)),
    "minicpm5": ToolFormat(MiniCpm5Parser, ('<function name="', '<param name="')),
    "deepseek_v32": ToolFormat(DeepSeekV32Parser, ("｜DSML｜", "function_calls>")),
    "deepseek_v4": ToolFormat(DeepSeekV4Parser, ("｜DSML｜",)),
    "kimi_k3": ToolFormat(KimiK3Parser, ("<|open|>", "<|close|>", "<|sep|>")),
    "kimi_k2": ToolFormat(KimiK2Parser, ("<|tool_calls_section_begin|>",)),
    "deepseek_v3": ToolFormat(DeepSeekV3Parser, ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": ToolFormat(DeepSeekV31Parser, ("<｜tool▁calls▁begin｜>",)),
    "gemma4": ToolFormat(Gemma4Parser, ("<|tool_call>", "<tool_call|>")),
    "function_gemma": ToolFormat(FunctionGemmaParser, ("<start_function_call>",)),
    "mistral": ToolFormat(MistralParser, ("[TOOL_CALLS]", "[ARGS]")),
    "mistral_array": ToolFormat(MistralArrayParser, ("[TOOL_CALLS]",)),
    "lfm2": ToolFormat(
        Lfm2Parser, ("<|tool_call_start|>",), ("<|tool_list_start|>",), tokens=_LFM2_TOKENS
    ),
    "olmo3": ToolFormat(Olmo3Parser, ("<function_calls>",)),
    "cohere": ToolFormat(CohereParser, ("<|START_ACTION|>",)),
    "apertus": ToolFormat(ApertusParser, ("<|tools_prefix|>",)),
    "nemotron_h": ToolFormat(NemotronHParser, ("<TOOLCALL>",)),
    "phi4_mini": ToolFormat(Phi4MiniParser, ("functools[",)),
    "granite3": ToolFormat(Granite3Parser, ("<|tool_call|>",)),
    "longcat": ToolFormat(LongCatParser, ("<longcat_tool_call>",)),
    "seed_oss": ToolFormat(SeedOssParser, ("<seed:tool_call>",)),
    "glm47": ToolFormat(Glm47Parser, ("<tool_call>", "</arg_key><arg_value>")),
    "glm": ToolFormat(GlmParser, ("<tool_call>", "<arg_key>")),
    "qwen3_coder": ToolFormat(Qwen3CoderParser, ("<function=", "<parameter=")),
    "jamba": ToolFormat(JambaParser, ("<tool_calls>[",)),
    "hermes": ToolFormat(HermesParser, ("<tool_call>",)),
    "minimax_m1": ToolFormat(MiniMaxM1Parser, ("<tool_calls>",)),
    "pythonic": ToolFormat(BarePythonicParser, ("[func_name1(",)),
    "llama3": ToolFormat(
        Llama3Parser, ("<|start_header_id|>", '"parameters"'), ("<|header_start|>", '"parameters"')
    ),
}
_THINK = ("<think>", "</think>")
# Likewise: a template with the end of the reasoning, and all that stands around answers, has it.
REASONING_FORMATS = {
    "think_response": ReasoningMarks(
        *_THINK,
        (("<response>", ""),),
        ("</response>",),
        ("<response></response>", "<response>\\n", "<response>\n"),
    ),
    "think_answer": ReasoningMarks(
        *_THINK, (("<answer>", ""),), ("</answer>",), ("<answer>\\n", "<answer>\n")
    ),
    "think": ReasoningMarks(*_THINK),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>"),
    "seed_oss": ReasoningMarks("<seed:think>", "</seed:think>"),
    "apertus": ReasoningMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    "granite": ReasoningMarks("Here is my thought process:", "Here is my response:"),
    "cohere": ReasoningMarks(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        (("<|START_RESPONSE|>", ""),),
        ("<|END_RESPONSE|>",),
    ),
    "cohere_text": ReasoningMarks(
        "<|START_THINKING|>", "<|END_THINKING|>", (("<|START_TEXT|>", ""),), ("<|END_TEXT|>",)
    ),
    "muse_spark": ReasoningMarks(
        "to=self<|message|>",
        "<|eom|>",
        (("<|start|>assistant", "<|message|>"), ("to=", "<|message|>")),
        ("<|eom|>", "<|eot|>"),
    ),
    "kimi_k3": ReasoningMarks(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        (("<|open|>response<|sep|>", ""),),
        ("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        ("<|open|>",),
    ),
}
# vLLM's names of the same formats, for those that are called something else here.
VLLM_TOOL_PARSERS = {
    "openai": "harmony",
    "minimax": "minimax_m1",
    "functiongemma": "function_gemma",
    "glm45": "glm",
    "qwen3_xml": "qwen3_coder",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
    "llama4_pythonic": "pythonic",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "granite": "granite3",
    "granite4": "hermes",
    "ernie45": "hermes",
    "hunyuan_a13b": "jamba",
    "phi4_mini_json": "phi4_mini",
    "minicpm5xml": "minicpm5",
    "muse_glimmer": "muse_spark",
}
VLLM_REASONING_PARSERS = {
    "openai_gptoss": HARMONY,
    "ernie45": "think_response",
    "hunyuan_a13b": "think_answer",
    "muse_glimmer": "muse_spark",
    "cohere_command3": "cohere",
    "cohere_command4": "cohere_text",
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2", "olmo3", "kimi_k2"), "think"
    ),
}


@dataclass(frozen=True)
class ReplyFormats:
    """What a model's replies may hold besides content, by the names of the formats."""

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def choose(
        cls,
        template: str,
        *,
        tools: str = AUTO,
        reasoning: str = AUTO,
        tokens: Collection[str] = (),
    ) -> ReplyFormats:
        """Those asked for by name; for "auto", those whose marks are in the chat template.

        `tokens` are the model's own, for templates that leave the marks of calls to the model.
        """
        return cls(
            _choose(
                "tool_parser",
                tools,
                {**dict.fromkeys(TOOL_FORMATS), **VLLM_TOOL_PARSERS},
                lambda: _find_tool_format(template, tokens),
            ),
            _choose(
                "reasoning_parser",
                reasoning,
                {**dict.fromkeys([*REASONING_FORMATS, HARMONY]), **VLLM_REASONING_PARSERS},
                lambda: _find_reasoning_format(template),
            ),
        )

    def ending_after(self, begun: str) -> str:
        """What stands for the end of a prompt whose last message is a reply to be continued.

        Empty, if that reply is: it may reason first.
        """
        if not begun or self.reasoning not in REASONING_FORMATS:
            return ""
        return REASONING_FORMATS[self.reasoning].last_in(begun)

    def parser(self, prompt: str, tools: Sequence[Tool] = ()) -> ReplyParser:
        """A parser of one reply to this prompt, which is a rendered chat, or the end of one."""
        if HARMONY in (self.reasoning, self.tools if tools else None):
            return HarmonyParser(tools)
        calls = TOOL_FORMATS[self.tools].parser(tools) if tools and self.tools else None
        rest = calls or PlainText()
        if self.reasoning is None:
            return rest
        marks = REASONING_FORMATS[self.reasoning]
        return ReasoningParser(
            marks,
            rest,
            is_open=marks.is_open_after(prompt),
            other_ends=calls.first_marks if calls and calls.ends_reasoning else (),
            call_marks=calls.first_marks if calls else (),
        )


def _choose(
    option: str, name: str, known: Mapping[str, str | None], find: Callable[[], str | None]
) -> str | None:
    """`known` has vLLM's names besides ours, each of them with our name."""
    if name == AUTO:
        return find()
    if name == OFF:
        return None
    if name not in known:
        choices = [AUTO, OFF, *known]
        near = difflib.get_close_matches(name, choices, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{option} {name!r} is unknown{hint}: use one of {', '.join(choices)}")
    return known[name] or name


def _find_tool_format(template: str, tokens: Collection[str]) -> str | None:
    for name, format in TOOL_FORMATS.items():
        if format.speaks(template):
            return name
    if "tools" not in template:
        return None
    for name, format in TOOL_FORMATS.items():
        if format.tokens and all(token in tokens for token in format.tokens):
            return name
    return None


def _find_reasoning_format(template: str) -> str | None:
    if TOOL_FORMATS[HARMONY].speaks(template):
        return HARMONY
    found = (name for name, marks in REASONING_FORMATS.items() if marks.are_in(template))
    return next(found, None)
