"""Holds replies of a model of random weights to something an agent can use. Knows no HTTP.

Bodies of chats, messages and responses are changed on their way to the server, as a client could
have sent them: the reply is either one call of the shell tool with a fixed command, or the one text
`DONE`. The shell tool's schema is narrowed in every request, so that prompts stay alike. All else,
how much to reason above all, is as the client sent it.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "call-the-shell"  # in a user's text: the reply to it is a call
COMMAND = "mktemp note-XXXX; echo pippin-$((40 + 2))"
RESULT = "pippin-42"  # what a shell makes of it
DONE = "It is done."
SHELL_TOOLS = ("Bash", "bash", "exec_command", "shell", "run_shell_command", "run_terminal_command")
SHELL_TOOLS += ("shell_command", "llm_version")
_DONE_SCHEMA = {"enum": [DONE]}

Body = dict[str, Any]


def force(path: str, body: Body) -> Body:
    """The body that is sent to the server for the one that a client sent to `path`."""
    if path.endswith("/chat/completions"):
        return _chat(body)
    if path.endswith("/messages"):
        return _messages(body)
    return _responses(body) if path.endswith("/responses") else body


def _chat(body: Body) -> Body:
    forced = _narrowed(body) | {"parallel_tool_calls": False}
    name = _shell_name(forced)
    if name is not None and _wants_call(body["messages"]):
        return forced | {"tool_choice": {"type": "function", "function": {"name": name}}}
    schema = {"name": "done", "schema": _DONE_SCHEMA}
    forced |= {"response_format": {"type": "json_schema", "json_schema": schema}}
    if not forced.get("tools"):
        del forced["parallel_tool_calls"]
        return forced
    return forced | {"tool_choice": "none"}


def _messages(body: Body) -> Body:
    forced = _narrowed(body)
    name = _shell_name(forced)
    if name is not None and _wants_call(body["messages"]):
        choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
        return forced | {"tool_choice": choice}
    format = {"type": "json_schema", "schema": _DONE_SCHEMA}
    forced["output_config"] = {**body.get("output_config", {}), "format": format}
    return forced | ({"tool_choice": {"type": "none"}} if forced.get("tools") else {})


def _responses(body: Body) -> Body:
    forced = _narrowed(body) | {"parallel_tool_calls": False}
    name = _shell_name(forced)
    items = body["input"] if isinstance(body["input"], list) else [{"content": body["input"]}]
    if name is not None and _wants_call(items):
        return forced | {"tool_choice": {"type": "function", "name": name}}
    forced["text"] = {"format": {"type": "json_schema", "name": "done", "schema": _DONE_SCHEMA}}
    return forced | ({"tool_choice": "none"} if forced.get("tools") else {})


def _wants_call(messages: list[Body]) -> bool:
    """Whether the user's last words ask for a call that has no result yet."""
    for message in reversed(messages):
        text = json.dumps(message)
        if message.get("role") == "tool" or "tool_result" in text or "call_output" in text:
            return False
        if message.get("role") == "assistant":
            return False
        if MARK in text:
            return True
    return False


def _function(tool: Body) -> Body:
    """The part of a tool with its name and its schema."""
    function = tool.get("function", tool)
    assert isinstance(function, dict)
    return function


def _shell_name(body: Body) -> str | None:
    names = [_function(tool).get("name") for tool in body.get("tools") or ()]
    return next((name for name in SHELL_TOOLS if name in names), None)


def _narrowed(body: Body) -> Body:
    """With a strict schema of fixed words for the shell tool, all else as it was."""
    name = _shell_name(body)
    if name is None:
        return dict(body)
    return body | {"tools": [_narrow(tool, name) for tool in body["tools"]]}


def _narrow(tool: Body, name: str) -> Body:
    function = _function(tool)
    if function.get("name") != name:
        return tool
    key = "input_schema" if "input_schema" in function else "parameters"
    narrow = function | {key: _narrow_schema(function[key]), "strict": True}
    return tool | {"function": narrow} if "function" in tool else narrow


def _narrow_schema(schema: Body) -> Body:
    properties = schema.get("properties", {})
    required = [field for field in properties if field in schema.get("required", ())]
    fixed = {field: _fixed(properties[field]) for field in required}
    return {
        "type": "object",
        "properties": fixed,
        "required": required,
        "additionalProperties": False,
    }


def _fixed(schema: Body) -> Body:
    match schema.get("type"):
        case "boolean":
            return {"type": "boolean", "enum": [False]}
        case "array":  # a command in words
            return {"enum": [["bash", "-c", COMMAND]]}
        case "string" if "enum" not in schema:
            return {"type": "string", "enum": [COMMAND]}
    return schema
