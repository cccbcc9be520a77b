"""The formats by name, and which of them a model's chat template speaks."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pippin.errors import ConfigError
from pippin.text.parsers.base import (
    NO_CALLS,
    NO_REASONING,
    CallFormat,
    ReasoningMarks,
    ReplyParser,
    Tool,
)
from pippin.text.parsers.json_calls import (
    HarmonyParser,
    JsonCallParser,
    Llama3Parser,
    MistralParser,
    NamedJsonParser,
)
from pippin.text.parsers.literal_calls import BarePythonicParser, GemmaParser, PythonicParser
from pippin.text.parsers.tagged_calls import (
    AttributeTagParser,
    KimiK3Parser,
    MiniCpm5Parser,
    TagCallParser,
)

AUTO, OFF = "auto", "off"
HARMONY = "harmony"  # one parser for reasoning and calls

_OBJECT = '{"name": "{name}", "arguments": {arguments}}'
_PARAMETERS = '{"name": "{name}", "parameters": {arguments}}'
_INVOKE = '<invoke name="{name}">\n{arguments}</invoke>\n'
_PARAMETER = '<parameter name="{key}">{value}</parameter>\n'
_DSML_INVOKE = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
_DSML_PARAMETER = '<｜DSML｜parameter name="{key}" string="{type}">{value}</｜DSML｜parameter>\n'
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_IS_STRING = {type: "true" if type == "string" else "false" for type in _TYPES}
_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>{call}{call}<｜tool▁calls▁end｜>"
_CALL_ID = ("[ARGS]", "[CALL_ID]")

# The first whose marks are all there is the template's: the particular before the general.
TOOL_FORMATS = {
    "harmony": CallFormat(
        HarmonyParser,
        ("<|channel|>", "<|message|>"),
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>",
        "{call}<|start|>assistant{call}",
        other_begins=("<|start|>",),
        other_ends=("<|end|>",),
        other_marks=("<|return|>",),
    ),
    "minimax_m2": CallFormat(
        AttributeTagParser,
        ("<minimax:tool_call>",),
        _INVOKE,
        "<minimax:tool_call>\n{call}{call}</minimax:tool_call>",
        argument=_PARAMETER,
    ),
    "muse_spark": CallFormat(
        AttributeTagParser,
        ("<atem:function_calls>",),
        '<atem:invoke name="{name}">\n{arguments}</atem:invoke>\n',
        "<atem:function_calls>\n{call}{call}</atem:function_calls>",
        argument='<atem:parameter name="{key}">{value}</atem:parameter>\n',
    ),
    "minicpm5": CallFormat(
        MiniCpm5Parser,
        ('<function name="', '<param name="'),
        '<function name="{name}">{arguments}</function>',
        argument='<param name="{key}">{value}</param>',
    ),
    "deepseek_v32": CallFormat(
        AttributeTagParser,
        ("｜DSML｜", "function_calls>"),
        _DSML_INVOKE,
        "<｜DSML｜function_calls>\n{call}{call}</｜DSML｜function_calls>",
        argument=_DSML_PARAMETER,
        types=_IS_STRING,
        other_marks=("｜DSML｜",),
    ),
    "deepseek_v4": CallFormat(
        AttributeTagParser,
        ("｜DSML｜",),
        _DSML_INVOKE,
        "<｜DSML｜tool_calls>\n{call}{call}</｜DSML｜tool_calls>",
        argument=_DSML_PARAMETER,
        types=_IS_STRING,
        other_marks=("｜DSML｜",),
    ),
    "kimi_k3": CallFormat(
        KimiK3Parser,
        ("<|open|>", "<|close|>", "<|sep|>"),
        '<|open|>call tool="{name}" index="{number}"<|sep|>{arguments}<|close|>call<|sep|>',
        "<|open|>tools<|sep|>{call}{call}<|close|>tools<|sep|>",
        argument=(
            '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>'
        ),
        types={type: type for type in _TYPES},
        ends_reasoning=True,
    ),
    "kimi_k2": CallFormat(
        NamedJsonParser,
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>",
        ends_reasoning=True,
    ),
    "deepseek_v3": CallFormat(
        NamedJsonParser,
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        _DEEPSEEK_CALLS.replace("}{", "}\n{"),
        ends_reasoning=True,
    ),
    "deepseek_v31": CallFormat(
        NamedJsonParser,
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        _DEEPSEEK_CALLS,
        ends_reasoning=True,
    ),
    "gemma4": CallFormat(
        GemmaParser,
        ("<|tool_call>", "<tool_call|>"),
        "<|tool_call>call:{name}{arguments}<tool_call|>",
        quote='<|"|>',
    ),
    "function_gemma": CallFormat(
        GemmaParser,
        ("<start_function_call>",),
        "<start_function_call>call:{name}{arguments}<end_function_call>",
        quote="<escape>",
    ),
    "mistral": CallFormat(
        MistralParser,
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]{name}[ARGS]{arguments}",
        other_marks=_CALL_ID,
        ends_reasoning=True,
    ),
    "mistral_array": CallFormat(
        MistralParser,
        ("[TOOL_CALLS]",),
        _OBJECT,
        "[TOOL_CALLS] [{call}, {call}]",
        other_marks=_CALL_ID,
        ends_reasoning=True,
    ),
    "lfm2": CallFormat(
        PythonicParser,
        ("<|tool_call_start|>",),
        "{name}({arguments})",
        "<|tool_call_start|>[{call}, {call}]<|tool_call_end|>",
        other_template_marks=("<|tool_list_start|>",),
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "olmo3": CallFormat(
        PythonicParser,
        ("<function_calls>",),
        "{name}({arguments})",
        "<function_calls>{call}\n{call}</function_calls>",
    ),
    "cohere": CallFormat(
        JsonCallParser,
        ("<|START_ACTION|>",),
        '{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}',
        "<|START_ACTION|>[\n    {call},\n    {call}\n]<|END_ACTION|>",
        ends_reasoning=True,
    ),
    "apertus": CallFormat(
        JsonCallParser,
        ("<|tools_prefix|>",),
        '{"{name}": {arguments}}',
        "<|tools_prefix|>[{call}, {call}]<|tools_suffix|>",
        ends_reasoning=True,
    ),
    "nemotron_h": CallFormat(
        JsonCallParser, ("<TOOLCALL>",), _OBJECT, "<TOOLCALL>[{call}, {call}]</TOOLCALL>"
    ),
    "phi4_mini": CallFormat(
        JsonCallParser,
        ("functools[",),
        _OBJECT,
        "functools[{call}, {call}]",
        other_begins=("functools", "<|tool_call|>"),
        other_ends=("<|/tool_call|>",),
    ),
    "granite3": CallFormat(
        JsonCallParser,
        ("<|tool_call|>",),
        _OBJECT,
        "<|tool_call|>[{call}, {call}]",
        other_begins=("<tool_call>",),
    ),
    "longcat": CallFormat(
        TagCallParser,
        ("<longcat_tool_call>",),
        "<longcat_tool_call>{name}\n{arguments}</longcat_tool_call>",
        "{call}\n{call}",
        argument=(
            "<longcat_arg_key>{key}</longcat_arg_key>\n"
            "<longcat_arg_value>{value}</longcat_arg_value>\n"
        ),
    ),
    "seed_oss": CallFormat(
        TagCallParser,
        ("<seed:tool_call>",),
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        "{call}\n{call}",
        argument="<parameter={key}>{value}</parameter>\n",
        other_begins=("<function=",),
    ),
    "glm47": CallFormat(
        TagCallParser,
        ("<tool_call>", "</arg_key><arg_value>"),
        "<tool_call>{name}{arguments}</tool_call>",
        argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    ),
    "glm": CallFormat(
        TagCallParser,
        ("<tool_call>", "<arg_key>"),
        "<tool_call>{name}\n{arguments}</tool_call>",
        "{call}\n{call}",
        argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "qwen3_coder": CallFormat(
        TagCallParser,
        ("<function=", "<parameter="),
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        "{call}\n{call}",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
        other_begins=("<function=",),
    ),
    "jamba": CallFormat(
        JsonCallParser, ("<tool_calls>[",), _OBJECT, "<tool_calls>[{call}, {call}]</tool_calls>"
    ),
    "hermes": CallFormat(
        JsonCallParser,
        ("<tool_call>",),
        f"<tool_call>\n{_OBJECT}\n</tool_call>",
        "{call}\n{call}",
    ),
    "minimax_m1": CallFormat(
        JsonCallParser, ("<tool_calls>",), _OBJECT, "<tool_calls>\n{call}\n{call}\n</tool_calls>"
    ),
    "pythonic": CallFormat(
        BarePythonicParser,
        ("[func_name1(",),
        "{name}({arguments})",
        "[{call}, {call}]",
        other_begins=("<|python_start|>",),
        other_ends=("<|python_end|>",),
    ),
    "llama3": CallFormat(
        Llama3Parser,
        ("<|start_header_id|>", '"parameters"'),
        _PARAMETERS,
        "{call}; {call}",
        other_begins=("<|python_tag|>",),
        other_template_marks=("<|header_start|>", '"parameters"'),
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
                _find_tool_format(template, tokens),
            ),
            _choose(
                "reasoning_parser",
                reasoning,
                {**dict.fromkeys([*REASONING_FORMATS, HARMONY]), **VLLM_REASONING_PARSERS},
                _find_reasoning_format(template),
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
            return TOOL_FORMATS[HARMONY].parser(tools)
        calls = TOOL_FORMATS[self.tools] if tools and self.tools else NO_CALLS
        marks = REASONING_FORMATS[self.reasoning] if self.reasoning else NO_REASONING
        if calls is NO_CALLS and marks is NO_REASONING:
            return ReplyParser()
        is_open = marks is not NO_REASONING and marks.is_open_after(prompt)
        return calls.parser(tools, reasoning=marks, is_open=is_open)


def _choose(
    option: str, name: str, known: Mapping[str, str | None], found: str | None
) -> str | None:
    """`known` has vLLM's names besides ours, each of them with our name."""
    if name == AUTO:
        return found
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
    may_call = (name for name, format in TOOL_FORMATS.items() if format.tokens)
    found = (name for name in may_call if {*TOOL_FORMATS[name].tokens} <= {*tokens})
    return next(found, None) if "tools" in template else None


def _find_reasoning_format(template: str) -> str | None:
    if TOOL_FORMATS[HARMONY].speaks(template):
        return HARMONY
    found = (name for name, marks in REASONING_FORMATS.items() if marks.are_in(template))
    return next(found, None)
