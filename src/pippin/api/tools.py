"""Declared functions and how a reply may call them, in OpenAI's words. Knows no format of calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pippin.api.body import Body, shown
from pippin.api.request import ToolUse
from pippin.errors import RequestError, UnsupportedField

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
MODES = ("auto", "none", "required")


@dataclass(frozen=True)
class Choice:
    """What `tool_choice` says: a mode, or the name of the one function to call."""

    mode: str = "auto"
    named: str | None = None


def read_chat_tools(body: Body) -> ToolUse:
    tools = [_chat_tool(tool) for tool in tool_bodies(body)]
    return tool_use(body, tools, _chat_choice(body))


def tool_bodies(body: Body) -> list[Body]:
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise body.wrong("tools", "a list")
    return [Body(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def tool_use(body: Body, tools: Sequence[dict[str, Any]], choice: Choice) -> ToolUse:
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise RequestError(f"two tools are called {shown(name)}", param="tools")
    if choice.named is not None and choice.named not in names:
        raise RequestError(
            f"tool_choice names {shown(choice.named)}, which is none of the tools",
            param="tool_choice",
        )
    if choice.mode == "required" and not tools:
        raise RequestError('tool_choice is "required", and there are no tools', param="tool_choice")
    return ToolUse(
        tools=tuple(tools),
        forbidden=choice.mode == "none",
        required=choice.mode == "required" or choice.named is not None,
        named=choice.named,
        parallel=body.boolean("parallel_tool_calls", True),
    )


def function_tool(
    declared: Body, parameters_field: str, *, strict: bool | None = None
) -> dict[str, Any]:
    """A function as templates want it; `strict` only where it is asked for."""
    declared.require("name")
    name = declared.string("name", "")
    if not NAME.fullmatch(name):
        raise declared.wrong("name", "1 to 128 letters, digits, underscores, dots or hyphens")
    function: dict[str, Any] = {"name": name}
    if (description := declared.string("description", None)) is not None:
        function["description"] = description
    if declared.has(parameters_field):
        schema = declared.get(parameters_field)
        Body(schema, declared.name(parameters_field))
        function["parameters"] = schema
    if declared.boolean("strict", False) if strict is None else strict:
        function["strict"] = True
    return {"type": "function", "function": function}


def read_mode(body: Body, value: Any) -> Choice:
    if value is None:
        return Choice()
    if value not in MODES:
        raise body.wrong("tool_choice", f"one of {', '.join(MODES)}, or an object with a function")
    return Choice(value)


def _chat_tool(tool: Body) -> dict[str, Any]:
    if tool.require("type") != "function":
        name = tool.name("type")
        raise UnsupportedField(
            f'{name} is {shown(tool.get("type"))}; only "function" is supported', param=name
        )
    tool.check_known({"type", "function", "cache_control"})
    function = Body(tool.require("function"), tool.name("function"))
    function.check_known({"name", "description", "parameters", "strict"})
    return function_tool(function, "parameters")


def _chat_choice(body: Body) -> Choice:
    value = body.get("tool_choice")
    if not isinstance(value, dict):
        return read_mode(body, value)
    choice = Body(value, "tool_choice")
    if choice.get("type") != "function":
        name = choice.name("type")
        raise UnsupportedField(
            f'{name} is {shown(choice.get("type"))}; only "function" is supported', param=name
        )
    function = Body(choice.require("function"), choice.name("function"))
    function.require("name")
    return Choice(named=function.string("name", ""))
