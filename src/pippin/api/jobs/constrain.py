"""What a whole reply must look like: reasoning, then calls or content.

A schema, a required call or no call is enforced behind the reasoning, which is free.
"""

from __future__ import annotations

from dataclasses import replace

from pippin.api.jobs.call_rules import ANY_TEXT, CallRules, Lark, alternatives
from pippin.api.requests.neutral_request import ChatRequest, Options
from pippin.decode.json_schema import check_schema, closed
from pippin.decode.size import check_size
from pippin.errors import RequestError, UnsupportedField
from pippin.text.bundle import TextBundle
from pippin.text.parsers.formats import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from pippin.text.parsers.json_calls import (
    ANALYSIS,
    COMMENTARY,
    FINAL,
    NEXT_MESSAGE,
    REPLY_BEGINS,
)
from pippin.text.prompt import Prompt
from pippin.types import GrammarPart, GrammarSpec, SamplingParams

_SPACE = "/[ \\n]{0,4}/"
_RECIPIENT = "/[^<\\n]{0,64}/"


def can_forbid_calls(text: TextBundle) -> bool:
    """Whether a model that knows of tools can be kept from calling them."""
    if text.formats.tools is None or not text.tokenizer.spells_bytes:
        return False
    trigger = TOOL_FORMATS[text.formats.tools].trigger
    return bool(text.tokenizer.eos_ids) and Lark(text.tokenizer).begins_with_mark(trigger)


def constrain(request: ChatRequest, prompt: Prompt, text: TextBundle) -> SamplingParams:
    """The request's parameters, with a grammar of all its constraints.

    A required call of tools whose schemas are too large together is any call, unless `strict`.
    """
    try:
        return _constrain(request, prompt, text)
    except UnsupportedField:
        raise
    except RequestError as error:
        if not request.tool_use.required or request.tool_use.strict:
            raise
        request.leniency.ignore("tools.parameters", error.message)
        return _constrain(request, prompt, text, holds_required=False)


def _constrain(
    request: ChatRequest, prompt: Prompt, text: TextBundle, *, holds_required: bool = True
) -> SamplingParams:
    params, tool_use = request.options.params, request.tool_use
    lark = Lark(text.tokenizer)
    reasoning = _reasoning(lark, prompt, text)
    content, free = _content(lark, params), ANY_TEXT
    if in_channels := _begins_message(prompt, text):
        header = lark.literal(FINAL)
        content, free = content and f"{header} {content}", f"{header} {ANY_TEXT}"
    if not tool_use.allowed:
        if tool_use.tools and can_forbid_calls(text):
            _check_composes(params, "calls are forbidden")
            return _with_grammar(request.options, lark, f"{reasoning} {content or free}")
        if params.grammar is None or not reasoning:
            return params
        _check_composes(params, "this model reasons first")
        return _with_grammar(request.options, lark, f"{reasoning} {content}")
    if tool_use.is_free and params.grammar is None:
        return params
    assert text.formats.tools is not None, "checked where the prompt was made"
    rules = CallRules(
        lark, text.formats.tools, tool_use, request.leniency, holds_required=holds_required
    )
    parts = tool_use.grammars
    if tool_use.required:
        _check_composes(params, "the reply must be a call")  # a schema holds for content: none
        start = f"{reasoning} {_required(lark, rules.calls(), text)}"
        return _with_grammar(request.options, lark, start, parts)
    rules.check_optional()
    _check_composes(params, "the reply may also be a call")
    if content or in_channels:
        start = f"{reasoning} ({content or free} | {rules.calls()})"
    else:
        start = f"{reasoning} {ANY_TEXT} {rules.calls()}?"
    return _with_grammar(request.options, lark, start, parts)


def _reasoning(lark: Lark, prompt: Prompt, text: TextBundle) -> str:
    """Reasoning before the rest; empty, if the prompt has closed it already."""
    if _begins_message(prompt, text):
        heads = alternatives([lark.literal(head) for head in (ANALYSIS, COMMENTARY)])
        return lark.rule(f"({heads} {ANY_TEXT} {lark.literal(NEXT_MESSAGE)})*")
    if text.formats.reasoning not in REASONING_FORMATS:
        return ""
    marks = REASONING_FORMATS[text.formats.reasoning]
    if prompt.ending.rstrip().endswith(marks.end):
        return ""
    rest = f"{lark.until(marks.end)} {_SPACE}"
    if marks.is_open_after(prompt.ending):
        return lark.rule(rest)
    return lark.rule(f"({_SPACE} {lark.literal(marks.begin)} {rest})?")


def _required(lark: Lark, calls: str, text: TextBundle) -> str:
    """Calls, and what templates write around them: white space, the marks of an empty answer."""
    marks = REASONING_FORMATS.get(text.formats.reasoning or "")
    if marks is None or not marks.headers:
        return f"{_SPACE} {calls}"
    headers = [
        f"{lark.literal(begin)} {_RECIPIENT} {lark.literal(end)}" if end else lark.literal(begin)
        for begin, end in marks.headers
    ]
    header = f"({alternatives(headers)} {_SPACE})?"
    trailer = f"({alternatives([lark.literal(each) for each in marks.trailers])} {_SPACE})?"
    return f"{_SPACE} {header} {trailer} {calls} {_SPACE} {trailer}"


def _begins_message(prompt: Prompt, text: TextBundle) -> bool:
    """Whether the reply is made of Harmony's messages, and begins with the header of one."""
    is_harmony = HARMONY in (text.formats.reasoning, text.formats.tools)
    return is_harmony and prompt.ending.endswith(REPLY_BEGINS)


def _content(lark: Lark, params: SamplingParams) -> str:
    """The schema that content must obey; nothing, if there is none."""
    grammar = params.grammar
    if grammar is None or grammar.kind != "json_schema":
        return ""
    return lark.json(closed(check_schema(grammar.text)))


def _check_composes(params: SamplingParams, why: str) -> None:
    for field in ("regex", "ebnf"):
        if getattr(params, field) is not None:
            raise UnsupportedField(f"{field} cannot be enforced, because {why}", param=field)


def _with_grammar(
    options: Options, lark: Lark, start: str, parts: tuple[GrammarPart, ...] = ()
) -> SamplingParams:
    grammar = lark.text(start)
    nbytes = len(grammar.encode())
    if nbytes > options.max_schema_bytes:
        raise RequestError(
            f"the tools' grammar has {nbytes:,} bytes; at most {options.max_schema_bytes:,} are "
            "allowed (--max-schema-bytes)",
            param="tools",
        )
    check_size(GrammarSpec("ebnf", grammar), "tools")
    return replace(options.params, json_schema=None, regex=None, ebnf=grammar, grammar_parts=parts)
