"""The formats by name, and which of them a model's chat template speaks. Knows no replies."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pippin.errors import ConfigError
from pippin.text.parsers.base import CallParser, PlainText, ReplyParser, Tool
from pippin.text.parsers.calls.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from pippin.text.parsers.calls.gemma import FunctionGemmaParser, Gemma4Parser
from pippin.text.parsers.calls.glm import GlmParser
from pippin.text.parsers.calls.harmony import HarmonyParser
from pippin.text.parsers.calls.hermes import HermesParser
from pippin.text.parsers.calls.kimi_k2 import KimiK2Parser
from pippin.text.parsers.calls.llama3 import Llama3Parser
from pippin.text.parsers.calls.minimax_m1 import MiniMaxM1Parser
from pippin.text.parsers.calls.minimax_m2 import MiniMaxM2Parser
from pippin.text.parsers.calls.mistral import MistralArrayParser, MistralParser
from pippin.text.parsers.calls.qwen3_coder import Qwen3CoderParser
from pippin.text.parsers.reasoning import ReasoningMarks, ReasoningParser

AUTO, OFF = "auto", "off"
HARMONY = "harmony"  # one parser for reasoning and calls


@dataclass(frozen=True)
class ToolFormat:
    parser: type[CallParser]
    template_marks: tuple[str, ...]  # a chat template with all of them speaks it


# The first whose marks are all there is the template's: the particular before the general.
TOOL_FORMATS = {
    "harmony": ToolFormat(HarmonyParser, ("<|channel|>", "<|message|>")),
    "minimax_m2": ToolFormat(MiniMaxM2Parser, ("<minimax:tool_call>",)),
    "kimi_k2": ToolFormat(KimiK2Parser, ("<|tool_calls_section_begin|>",)),
    "deepseek_v3": ToolFormat(DeepSeekV3Parser, ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": ToolFormat(DeepSeekV31Parser, ("<｜tool▁calls▁begin｜>",)),
    "gemma4": ToolFormat(Gemma4Parser, ("<|tool_call>", "<tool_call|>")),
    "function_gemma": ToolFormat(FunctionGemmaParser, ("<start_function_call>",)),
    "mistral": ToolFormat(MistralParser, ("[TOOL_CALLS]", "[ARGS]")),
    "mistral_array": ToolFormat(MistralArrayParser, ("[TOOL_CALLS]",)),
    "glm": ToolFormat(GlmParser, ("<tool_call>", "<arg_key>")),
    "qwen3_coder": ToolFormat(Qwen3CoderParser, ("<function=", "<parameter=")),
    "hermes": ToolFormat(HermesParser, ("<tool_call>",)),
    "minimax_m1": ToolFormat(MiniMaxM1Parser, ("<tool_calls>",)),
    "llama3": ToolFormat(Llama3Parser, ("<|start_header_id|>", '"parameters"')),
}
REASONING_FORMATS = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "gemma4": ReasoningMarks("<|channel>thought", "<channel|>"),
}
# vLLM's names of the same formats, for those that are called something else here.
VLLM_TOOL_PARSERS = {
    "openai": "harmony",
    "minimax": "minimax_m1",
    "functiongemma": "function_gemma",
    "glm45": "glm",
    "glm47": "glm",
    "qwen3_xml": "qwen3_coder",
    "llama3_json": "llama3",
    "llama4_json": "llama3",
}
VLLM_REASONING_PARSERS = {
    "openai_gptoss": HARMONY,
    **dict.fromkeys(("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "minimax_m2"), "think"),
}


@dataclass(frozen=True)
class ReplyFormats:
    """What a model's replies may hold besides content, by the names of the formats."""

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def choose(cls, template: str, *, tools: str = AUTO, reasoning: str = AUTO) -> ReplyFormats:
        """Those asked for by name; for "auto", those whose marks are in the chat template."""
        return cls(
            _choose(
                "tool_parser",
                tools,
                {**dict.fromkeys(TOOL_FORMATS), **VLLM_TOOL_PARSERS},
                lambda: _find_tool_format(template),
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


def _find_tool_format(template: str) -> str | None:
    found = (
        name
        for name, format in TOOL_FORMATS.items()
        if all(mark in template for mark in format.template_marks)
    )
    return next(found, None)


def _find_reasoning_format(template: str) -> str | None:
    if all(mark in template for mark in TOOL_FORMATS[HARMONY].template_marks):
        return HARMONY
    found = (name for name, marks in REASONING_FORMATS.items() if marks.end in template)
    return next(found, None)
