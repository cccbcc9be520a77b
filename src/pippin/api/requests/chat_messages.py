"""Validates the messages of a chat and makes them what templates expect. Knows no template."""

from __future__ import annotations

from typing import Any

from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import MAX_MESSAGES, check_count
from pippin.api.requests.custom_tools import arguments_of
from pippin.api.requests.json_scan import check_json_size
from pippin.errors import RequestError, UnsupportedField

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id"),
        *("reasoning_content", "reasoning", "cache_control"),
    }
)
# Clients send a reply back as it came, with these empty.
_ONLY_EMPTY = frozenset({"audio", "function_call", "annotations", "refusal"})


def parse_messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError(
            f"messages is {shown(value)}; it must be a list of at least one message",
            param="messages",
        )
    check_count(value, MAX_MESSAGES, "messages", "messages")
    return [_parse_message(Body(item, f"messages[{i}]")) for i, item in enumerate(value)]


def _parse_message(body: Body) -> dict[str, Any]:
    body.check_known(_FIELDS | _ONLY_EMPTY)
    for field in _ONLY_EMPTY:
        if body.get(field):
            name = body.name(field)
            raise UnsupportedField(f"{name} is not supported in a message", param=name)
    _check_cache_control(body)
    role = body.require("role")
    if role not in ROLES:
        raise body.wrong("role", f"one of {', '.join(ROLES)}")
    message: dict[str, Any] = {"role": role, "content": _parse_content(body, role)}
    for field in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (text := body.string(field, None)) is not None:
            message[field] = text
    if body.has("tool_calls"):
        if role != "assistant":
            name = body.name("tool_calls")
            raise RequestError(f"{name}: only the assistant calls tools", param=name)
        message["tool_calls"] = _parse_tool_calls(body)
    return message


def _parse_content(body: Body, role: str) -> str:
    content = body.get("content")
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":  # it only called tools
        return ""
    if not isinstance(content, list):
        raise body.wrong("content", "a string or a list of text parts")
    parts = (Body(part, f"{body.name('content')}[{i}]") for i, part in enumerate(content))
    return "".join(_parse_part(part) for part in parts)


def _parse_part(part: Body) -> str:
    kind = part.require("type")
    if kind != "text":
        name = part.name("type")
        raise UnsupportedField(
            f"{name} is {shown(kind)}; this server reads only text parts", param=name
        )
    part.check_known({"type", "text", "cache_control"})
    _check_cache_control(part)
    part.require("text")
    return part.string("text", "")


def _check_cache_control(body: Body) -> None:
    """Where to cache, as clients tell other servers. Here every prefix is, whatever it says."""
    if body.has("cache_control"):
        Body(body.get("cache_control"), body.name("cache_control"))


def _parse_tool_calls(body: Body) -> list[dict[str, Any]]:
    calls = body.get("tool_calls")
    if not isinstance(calls, list):
        raise body.wrong("tool_calls", "a list")
    return [
        _parse_tool_call(Body(call, f"{body.name('tool_calls')}[{i}]"))
        for i, call in enumerate(calls)
    ]


def _parse_tool_call(call: Body) -> dict[str, Any]:
    kind = call.one_of("type", ("function", "custom")) or "function"
    call.check_known({"id", "type", kind, "index"})
    called = Body(call.require(kind), call.name(kind))
    called.check_known({"name", "input" if kind == "custom" else "arguments"})
    called.require("name")
    if kind == "custom":
        arguments = arguments_of(called.string("input", ""))
    else:
        arguments = read_arguments(called)
    return {
        "id": call.string("id", ""),
        "type": "function",
        "function": {"name": called.string("name", ""), "arguments": arguments},
    }


def read_arguments(call: Body) -> str:
    """JSON that a template may want decoded: as deep and as large as a body may be."""
    arguments, name = call.string("arguments", "{}"), call.name("arguments")
    check_json_size(arguments.encode(), name, name)
    return arguments
