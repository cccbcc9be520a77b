"""Validates the messages of a chat and makes them what templates expect. Knows no template."""

from __future__ import annotations

import json
from typing import Any

from pippin.api.fields.openai import ROLES
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_MESSAGES, check_count
from pippin.api.requests.content.text_parts import texts_of
from pippin.api.requests.custom_tools import arguments_of
from pippin.api.requests.json_scan import check_json_size

Message = dict[str, Any]
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning")
_OLD_CALL = "function_call"
# Clients send a reply back as it was, with these empty.
_OFTEN_EMPTY = ("audio", "annotations", "refusal")
_FIELDS = frozenset({"role", "content", "tool_calls", "cache_control", _OLD_CALL, *_TEXTS})


def message_bodies(body: Body) -> list[Body]:
    expected = "a list of at least one message"
    bodies = body.objects("messages", expected)
    if not bodies:
        raise body.wrong("messages", expected)
    check_count(bodies, MAX_MESSAGES, "messages", "messages")
    return bodies


def parse_messages(body: Body) -> list[Message]:
    return [_parse_message(message) for message in message_bodies(body)]


def function_call(id: str, name: str, arguments: str | dict[str, Any]) -> Message:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def read_arguments(call: Body) -> str:
    """JSON that a template may want decoded: as deep and as large as a body may be."""
    arguments, name = call.string("arguments", "{}"), call.name("arguments")
    check_json_size(arguments.encode(), name, name)
    return arguments


def _parse_message(body: Body) -> Message:
    body.ignore_unknown(_FIELDS | {field for field in _OFTEN_EMPTY if not body.get(field)})
    if body.get(_OLD_CALL):
        raise body.unsupported(_OLD_CALL, "it is the old name of tool_calls")
    body.object("cache_control")
    body.require("role")
    role = body.one_of("role", ROLES)
    only_calls = role == "assistant" and not body.has("content")
    content = "" if only_calls else "".join(texts_of(body, "content"))
    message: Message = {"role": role, "content": content}
    message |= {field: text for field in _TEXTS if (text := body.string(field, None)) is not None}
    if body.has("tool_calls"):
        if role != "assistant":
            raise body.error("tool_calls", "must be in a message of the assistant")
        message["tool_calls"] = [_parse_tool_call(call) for call in body.objects("tool_calls")]
    return message


def _parse_tool_call(call: Body) -> Message:
    kind = call.one_of("type", ("function", "custom")) or "function"
    call.ignore_unknown({"id", "type", kind, "index"})
    called = call.required_object(kind)
    called.ignore_unknown({"name", "input" if kind == "custom" else "arguments"})
    name = called.required_string("name")
    if kind == "custom":
        arguments = arguments_of(called.string("input", ""))
    else:
        arguments = read_arguments(called)
    return function_call(call.string("id", ""), name, arguments)
