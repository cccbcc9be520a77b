"""Anthropic's request as a neutral one. Knows no replies.

`cache_control` is accepted where Anthropic allows it, and changes nothing: every prefix is cached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.api.dialects.messages.conversation import parse_conversation
from pippin.api.dialects.messages.deferred_tools import DeferredTools
from pippin.api.dialects.shared_options import read_options, template_variables
from pippin.api.fields.anthropic import COUNT_TOKENS, EFFORTS, MESSAGES
from pippin.api.fields.client_tools import client_tool
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.neutral_request import ChatRequest, ToolUse
from pippin.api.requests.normalisation.prompt_normalisation import normalise
from pippin.api.requests.tools import (
    DeclaredTool,
    ToolChoice,
    function_tool,
    is_left_out,
    tool_bodies,
    tool_use,
)

_SHARED_TOOL_FIELDS = {"type", "name", "cache_control", "strict", "defer_loading"}
_TOOL_FIELDS = _SHARED_TOOL_FIELDS | {"description", "input_schema"}
_CLIENT_TOOL_FIELDS = _SHARED_TOOL_FIELDS | {"max_characters"}
_HARMLESS_TOOL_FIELDS = {"eager_input_streaming", "input_examples"}
_SAME_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "speculate", "stream", "priority", "timeout"),
    *("min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
)
_KEEP_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


def parse_message_request(
    fields: Any, rules: RequestRules, *, counts_only: bool = False
) -> ChatRequest:
    """A request for a reply; or, if it is only to be counted, for the length of its prompt."""
    body = rules.body(fields)
    (COUNT_TOKENS if counts_only else MESSAGES).check(body, rules)
    _check_edits(body)
    options = read_options(_openai_body(body), rules)
    if options.max_tokens is not None:
        # Clients ask for Claude's longest reply: a shorter one that fits is as good.
        options = replace(options, max_tokens=None, most_tokens=options.max_tokens)
    tools = _tools(body)
    deferred = DeferredTools(tools)
    messages = normalise(parse_conversation(body, deferred), rules, options.salt)
    return ChatRequest(
        options=options,
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tool_use=_tool_use(body, deferred.callable(tools)),
        reasoning_effort=_effort(body),
        effort_field="output_config.effort" if body.has("output_config") else "thinking",
        template_variables=template_variables(body),
        leniency=body.leniency,
    )


def _openai_body(body: Body) -> Body:
    """The fields that are OpenAI's too, by their names there."""
    fields = {field: body.get(field) for field in (*_SAME_FIELDS, "cache_salt")}
    schema = _schema(body)
    stop = body.get("stop_sequences")
    return body.renamed({**fields, "stop": stop, "json_schema": schema})


def _schema(body: Body) -> dict[str, Any] | None:
    config = body.object("output_config")
    format = None if config is None else config.object("format")
    if format is None:
        return None
    if format.get("type") != "json_schema":
        raise format.wrong("type", '"json_schema"')
    format.check_known({"type", "schema"})
    format.required_object("schema")
    return dict(format.get("schema"))


def _check_edits(body: Body) -> None:
    """A conversation is not edited; it is kept whole."""
    management = body.object("context_management") or Body({})
    if management.get("edits") not in (None, [], [_KEEP_ALL_THINKING]):
        management.ignore("edits", "contexts are not edited")


def _effort(body: Body) -> str | None:
    thinking = body.get("thinking")
    if thinking is not None and thinking.get("type") == "disabled":
        return "none"
    effort = body.get("output_config", {}).get("effort")
    if effort is not None:
        return EFFORTS[effort]
    return None if thinking is None else "medium"


def _tools(body: Body) -> list[DeclaredTool]:
    given = tool_bodies(body)
    tools = [_tool(tool) for tool in given if not _is_left_out(tool)]
    if any(_is_search(tool) for tool in given):  # Anthropic's, which finds nothing here
        return [replace(tool, deferred=False) for tool in tools]
    return tools


def _is_search(tool: Body) -> bool:
    return tool.string("type", "").startswith("tool_search_tool_")


def _tool_use(body: Body, tools: list[DeclaredTool]) -> ToolUse:
    choice, parallel = ToolChoice(), True
    if (given := body.object("tool_choice")) is not None:
        kind = given.one_of("type", ("auto", "any", "tool", "none"))
        parallel = not given.boolean("disable_parallel_tool_use", False)
        if kind == "tool":
            choice = ToolChoice.of(given.required_string("name"))
        else:
            choice = ToolChoice({"any": "required", "none": "none"}.get(kind or "auto", "auto"))
    use = tool_use(body, tools, choice)
    return replace(use, parallel=use.parallel and parallel)


def _is_left_out(tool: Body) -> bool:
    if not tool.has("type") or client_tool(tool.required_string("type")) is not None:
        return False
    return is_left_out(tool, ("custom",))


def _tool(tool: Body) -> DeclaredTool:
    deferred = tool.boolean("defer_loading", False)
    if (known := client_tool(tool.string("type", ""))) is not None:
        tool.ignore_unknown(_CLIENT_TOOL_FIELDS | _HARMLESS_TOOL_FIELDS)
        given = {"name": tool.get("name"), "strict": tool.get("strict"), **known}
        return replace(function_tool(tool.renamed(given), "parameters"), deferred=deferred)
    tool.ignore_unknown(_TOOL_FIELDS | _HARMLESS_TOOL_FIELDS)
    tool.require("input_schema")
    return replace(function_tool(tool, "input_schema"), deferred=deferred)
