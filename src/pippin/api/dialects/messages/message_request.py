"""Anthropic's request as a neutral one. Knows no replies.

`cache_control` is accepted wherever it may stand, and changes nothing: every prefix is cached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.api.dialects.messages.conversation import parse_conversation
from pippin.api.dialects.shared_options import check_model, read_options
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import MAX_LABEL_VALUE_CHARS
from pippin.api.requests.fields import MESSAGES_HONOURED, MESSAGES_REFUSED, check_fields
from pippin.api.requests.neutral_request import ChatRequest, ToolUse
from pippin.api.requests.tools import (
    DeclaredTool,
    ToolChoice,
    function_tool,
    tool_bodies,
    tool_use,
    unknown_kind,
)
from pippin.config import LimitsConfig
from pippin.errors import UnsupportedField
from pippin.text.bundle import SamplingDefaults

_TOOL_FIELDS = {"type", "name", "description", "input_schema", "cache_control", "strict"}
_HARMLESS_TOOL_FIELDS = {"eager_input_streaming", "input_examples"}
_EXTRA_FIELDS = ("priority", "timeout", "cache_salt")
_KEEP_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
THINKING = ("enabled", "disabled", "adaptive")
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}


def parse_message_request(
    fields: Any,
    model: ModelInfo,
    defaults: SamplingDefaults,
    limits: LimitsConfig,
    *,
    counts_only: bool = False,
) -> ChatRequest:
    """A request for a reply; or, if it is only to be counted, for the length of its prompt."""
    body = Body(fields)
    check_fields(body, MESSAGES_HONOURED, MESSAGES_REFUSED)
    check_model(body, model)
    if not counts_only:
        body.require("max_tokens")
    body.label("user_profile_id")
    if body.has("metadata"):
        metadata = Body(body.get("metadata"), "metadata")
        metadata.check_known({"user_id"})
        metadata.label("user_id", MAX_LABEL_VALUE_CHARS)
    _object(body, "cache_control")
    _check_edits(body)
    options = read_options(_openai_body(body, limits), model, defaults, limits)
    if options.max_tokens is not None:
        # Clients ask for what Claude could say: what fits is as good.
        options = replace(options, max_tokens=None, most_tokens=options.max_tokens)
    return ChatRequest(
        options=options,
        messages=parse_conversation(body),
        tool_use=_tools(body),
        reasoning_effort=_effort(body),
        effort_field="output_config.effort" if body.has("output_config") else "thinking",
    )


def _openai_body(body: Body, limits: LimitsConfig) -> Body:
    """The fields that are OpenAI's too, by their names there."""
    body.number("temperature", 0, 1, None)
    same = ("max_tokens", "temperature", "top_p", "top_k", "stream", *_EXTRA_FIELDS)
    fields = {field: body.get(field) for field in same if body.has(field)}
    fields["stop"] = list(body.strings("stop_sequences", limits.max_stops, "--max-stops"))
    if (schema := _schema(body)) is not None:
        fields["json_schema"] = schema
    return Body(fields)


def _schema(body: Body) -> dict[str, Any] | None:
    """What `output_config.format` asks for."""
    config = _object(body, "output_config")
    if config is None:
        return None
    config.check_known({"effort", "format"})
    format = _object(config, "format")
    if format is None:
        return None
    if format.get("type") != "json_schema":
        raise format.wrong("type", '"json_schema"')
    format.check_known({"type", "schema"})
    schema = format.require("schema")
    Body(schema, format.name("schema"))
    return dict(schema)


def _check_edits(body: Body) -> None:
    """A conversation is shown as it came: an edit is let pass that would change nothing."""
    management = _object(body, "context_management")
    edits = None if management is None else management.get("edits")
    if edits not in (None, [], [_KEEP_ALL_THINKING]):
        raise UnsupportedField(
            f"context_management.edits is {shown(edits)}; contexts are not edited (only "
            f"{shown([_KEEP_ALL_THINKING])} is accepted)",
            param="context_management.edits",
        )


def _effort(body: Body) -> str | None:
    thinking = _object(body, "thinking")
    if thinking is not None:
        thinking.check_known({"type", "budget_tokens", "display"})
        thinking.integer("budget_tokens", 1, None, None)  # the most; a reply may take less
        thinking.one_of("display", ("summarized", "omitted"))
        kind = thinking.one_of("type", THINKING)
        if kind == "disabled":
            return "none"
    config = _object(body, "output_config")
    if config is not None and (effort := config.one_of("effort", tuple(EFFORTS))) is not None:
        return EFFORTS[effort]
    return None if thinking is None else "medium"


def _tools(body: Body) -> ToolUse:
    tools = [_tool(tool) for tool in tool_bodies(body)]
    choice, parallel = ToolChoice(), True
    if (given := _object(body, "tool_choice")) is not None:
        kind = given.one_of("type", ("auto", "any", "tool", "none"))
        parallel = not given.boolean("disable_parallel_tool_use", False)
        if kind == "tool":
            given.require("name")
            choice = ToolChoice.of(given.string("name", ""))
        else:
            choice = ToolChoice({"any": "required", "none": "none"}.get(kind or "auto", "auto"))
    use = tool_use(body, tools, choice)
    return replace(use, parallel=use.parallel and parallel)


def _tool(tool: Body) -> DeclaredTool:
    if tool.get("type") not in (None, "custom"):
        raise unknown_kind(tool, "functions of your own")
    tool.check_known(_TOOL_FIELDS | _HARMLESS_TOOL_FIELDS)
    tool.require("input_schema")
    return function_tool(tool, "input_schema")


def _object(body: Body, field: str) -> Body | None:
    return Body(body.get(field), body.name(field)) if body.has(field) else None
