"""Tools and tool_choice of OpenAI's two chat dialects. Knows no other field.

Chat completions nest them one level deeper than Responses, under the name of their kind.
"""

from __future__ import annotations

from typing import Any

from pippin.api.requests.body import Body
from pippin.api.requests.neutral_request import ToolUse
from pippin.api.requests.shell_tools import CONTAINERS, SHELL_TOOLS, shell_function
from pippin.api.requests.tools import (
    OWN_KINDS,
    DeclaredTool,
    ToolChoice,
    custom_tool,
    function_tool,
    is_left_out,
    tool_bodies,
    tool_name,
    tool_use,
)

FUNCTION, CUSTOM, NAMESPACE, ALLOWED = "function", "custom", "namespace", "allowed_tools"
_CALLED, _SHELLS = (FUNCTION, CUSTOM), tuple(SHELL_TOOLS)
_KNOWN = "function and custom are supported"
MODES = ("auto", "none", "required")
_FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}
_CUSTOM_FIELDS = {"name", "description", "format"}
# What tools of Responses have besides: they are shown at once here, and run by the client.
_ONLY_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
}


def read_chat_tools(body: Body) -> ToolUse:
    tools = [_chat_tool(tool) for tool in tool_bodies(body) if not is_left_out(tool, _CALLED)]
    return tool_use(body, tools, _choice(body, nested=True))


def read_responses_tools(body: Body) -> ToolUse:
    kept = [
        tool
        for tool in tool_bodies(body)
        if not _runs_elsewhere(tool) and not is_left_out(tool, (*OWN_KINDS, *_SHELLS))
    ]
    tools = [each for tool in kept for each in _responses_tools(tool)]
    return tool_use(body, tools, _choice(body, nested=False))


def _chat_tool(tool: Body) -> DeclaredTool:
    kind = tool.get("type")
    tool.ignore_unknown({"type", kind, "cache_control"})
    inner = tool.required_object(kind)
    inner.ignore_unknown(_FUNCTION_FIELDS if kind == FUNCTION else _CUSTOM_FIELDS)
    if kind == FUNCTION:
        return function_tool(inner, "parameters")
    return custom_tool(inner, grammar_field="grammar")


def _runs_elsewhere(tool: Body) -> bool:
    """A shell in a container of OpenAI's: it is left out, as all that only OpenAI can run."""
    environment = tool.object("environment") if tool.get("type") == "shell" else None
    if environment is None or environment.get("type") not in CONTAINERS:
        return False
    environment.ignore("type", "this server runs no tools", environment.required_string("type"))
    return True


def _responses_tools(tool: Body) -> list[DeclaredTool]:
    if (kind := tool.get("type")) in _SHELLS:
        tool.ignore_unknown({"type", "allowed_callers", "environment"})
        return [DeclaredTool(shell_function(kind), is_shell=True)]
    if tool.get("type") != NAMESPACE:
        return [_responses_tool(tool)]
    tool.ignore_unknown({"type", "name", "description", "tools"})
    name, description = tool_name(tool), tool.string("description", "")
    kept = [each for each in tool_bodies(tool) if not is_left_out(each, _CALLED)]
    return [_responses_tool(each).within(name, description) for each in kept]


def _responses_tool(tool: Body) -> DeclaredTool:
    kind = tool.get("type")
    for field, neutral in _ONLY_NEUTRAL.items():
        if tool.has(field) and tool.get(field) not in neutral:
            tool.ignore(field, "tools are shown at once, and the client runs them")
    fields = _FUNCTION_FIELDS | {"output_schema"} if kind == FUNCTION else _CUSTOM_FIELDS
    tool.ignore_unknown({"type", *fields, *_ONLY_NEUTRAL})
    return function_tool(tool, "parameters") if kind == FUNCTION else custom_tool(tool)


def _choice(body: Body, *, nested: bool) -> ToolChoice:
    value = body.get("tool_choice")
    if not isinstance(value, dict):
        return ToolChoice(body.one_of("tool_choice", MODES) or "auto")
    choice = body.required_object("tool_choice")
    kind = choice.get("type")
    if kind in _SHELLS and not nested:
        return ToolChoice.of(kind)
    if kind in (FUNCTION, CUSTOM):
        return ToolChoice.of(_name_in(choice, nested=nested))
    if kind != ALLOWED:
        raise choice.unsupported("type", f"{_KNOWN}, and {ALLOWED}")
    allowed = choice.required_object(ALLOWED) if nested else choice
    allowed.check_known({"type", "mode", "tools"})
    for field in ("mode", "tools"):
        allowed.require(field)
    mode = allowed.one_of("mode", ("auto", "required")) or "auto"
    tools = tool_bodies(allowed)
    if not tools:
        raise allowed.wrong("tools", "a list of at least one tool")
    known = _CALLED if nested else (*_CALLED, *_SHELLS)
    kept = [tool for tool in tools if not is_left_out(tool, known)]
    return ToolChoice(mode, tuple(_name_in(tool, nested=nested) for tool in kept))


def _name_in(tool: Body, *, nested: bool) -> str:
    kind = tool.require("type")
    if kind in _SHELLS and not nested:
        return str(kind)
    if kind not in (FUNCTION, CUSTOM):
        raise tool.unsupported("type", _KNOWN)
    return (tool.required_object(kind) if nested else tool).required_string("name")
