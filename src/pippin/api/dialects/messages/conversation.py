"""Anthropic's messages as templates want them. Knows no other field of a request.

Results of tools stand inside a user's message there; here each is a message of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import MAX_MESSAGES, check_count
from pippin.errors import RequestError, UnsupportedField

Message = dict[str, Any]
# Claude Code writes a line with a checksum first, another one in each turn. A prompt that began
# with it would never be found in the prefix cache.
ROLES = ("user", "assistant", "system")
_BILLING = "x-anthropic-billing-header:"


def parse_conversation(body: Body) -> list[Message]:
    given = body.require("messages")
    if not isinstance(given, list) or not given:
        raise body.wrong("messages", "a list of at least one message")
    check_count(given, MAX_MESSAGES, "messages", "messages")
    messages = [*_system(body)]
    for number, item in enumerate(given):
        messages += _message(Body(item, f"messages[{number}]"))
    if messages[-1]["role"] == "assistant":
        raise UnsupportedField(
            "the last message is the assistant's: a reply that was begun is not continued",
            param=f"messages[{len(given) - 1}]",
        )
    return messages


def _system(body: Body) -> Iterator[Message]:
    if not body.has("system"):
        return
    texts = [text for text in _texts(body, "system") if not text.startswith(_BILLING)]
    if texts:
        yield {"role": "system", "content": "\n".join(texts)}


def _message(message: Body) -> Iterator[Message]:
    message.check_known({"role", "content", "cache_control"})
    message.require("role")
    role = message.one_of("role", ROLES)
    if message.require("content") == [] and role != "assistant":
        raise message.wrong("content", "a string or a list of at least one block")
    if role == "assistant":
        yield _assistant(message)
    elif role == "system":
        yield {"role": "system", "content": "\n".join(_texts(message, "content"))}
    else:
        yield from _user(message)


def _user(message: Body) -> Iterator[Message]:
    texts: list[str] = []
    for block in _blocks(message, "content"):
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            yield _tool_result(block)
        else:
            texts.append(_text(block))
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _tool_result(block: Body) -> Message:
    block.check_known({"type", "tool_use_id", "content", "is_error", "cache_control"})
    block.require("tool_use_id")
    text = "\n".join(_texts(block, "content")) if block.has("content") else ""
    failed = block.boolean("is_error", False)
    return {
        "role": "tool",
        "tool_call_id": block.string("tool_use_id", ""),
        "content": f"Error: {text}" if failed else text,
    }


def _assistant(message: Body) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls = []
    for block in _blocks(message, "content"):
        match block.get("type"):
            case "thinking":
                reasoning.append(block.string("thinking", ""))
            case "redacted_thinking":  # nobody here can read it
                pass
            case "tool_use":
                calls.append(_call(block))
            case _:
                content.append(_text(block))
    found: Message = {"role": "assistant", "content": "".join(content)}
    if any(reasoning):
        found["reasoning_content"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(block: Body) -> Message:
    block.check_known({"type", "id", "name", "input", "cache_control", "caller"})
    for field in ("id", "name"):
        block.require(field)
    given = block.get("input") if block.has("input") else {}
    Body(given, block.name("input"))
    function = {
        "name": block.string("name", ""),
        "arguments": json.dumps(given, ensure_ascii=False),
    }
    return {"id": block.string("id", ""), "type": "function", "function": function}


def _texts(body: Body, field: str) -> list[str]:
    return [_text(block) for block in _blocks(body, field)]


def _text(block: Body) -> str:
    kind = block.require("type")
    if kind != "text":
        name = block.name("type")
        raise UnsupportedField(f"{name} is {shown(kind)}; it cannot be read here", param=name)
    block.check_known({"type", "text", "cache_control", "citations"})
    block.require("text")
    return block.string("text", "")


def _blocks(body: Body, field: str) -> list[Body]:
    """A list of blocks, or a string, which is one of text."""
    value = body.get(field)
    if isinstance(value, str):
        value = [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise RequestError(
            f"{body.name(field)} is {shown(value)}; it must be a string or a list of blocks",
            param=body.name(field),
        )
    return [Body(block, f"{body.name(field)}[{i}]") for i, block in enumerate(value)]
