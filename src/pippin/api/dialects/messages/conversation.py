"""Anthropic's messages as templates want them. Knows no other field of a request.

Results of tools are inside a user's message there; here each is a message of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from pippin.api.dialects.messages.deferred_tools import REFERENCE, DeferredTools
from pippin.api.fields.anthropic import ROLES
from pippin.api.requests.body import Body
from pippin.api.requests.content.chat_messages import Message, function_call, message_bodies
from pippin.api.requests.content.text_parts import text_of, texts_of

_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")  # of the assistant


def parse_conversation(body: Body, deferred: DeferredTools) -> list[Message]:
    messages = [*_system(body)]
    for message in message_bodies(body):
        messages += _message(message, deferred)
    return messages


def _system(body: Body) -> Iterator[Message]:
    texts = texts_of(body, "system") if body.has("system") else []
    if texts:
        yield {"role": "system", "content": "\n".join(texts)}


def _message(message: Body, deferred: DeferredTools) -> Iterator[Message]:
    message.ignore_unknown({"role", "content", "cache_control"})
    message.require("role")
    role = message.one_of("role", ROLES)
    if message.require("content") == [] and role != "assistant":
        raise message.wrong("content", "a string or a list of at least one block")
    if role == "assistant":
        yield _assistant(message)
    elif role == "system":
        yield {"role": "system", "content": "\n".join(texts_of(message, "content"))}
    else:
        yield from _user(message, deferred)


def _user(message: Body, deferred: DeferredTools) -> Iterator[Message]:
    texts: list[str] = []
    for block in _blocks(message, "content"):
        if block.get("type") == "tool_result":
            if texts:
                yield {"role": "user", "content": "\n".join(texts)}
                texts = []
            yield _tool_result(block, deferred)
        else:
            texts.append(text_of(block))
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


def _tool_result(block: Body, deferred: DeferredTools) -> Message:
    block.ignore_unknown({"type", "tool_use_id", "content", "is_error", "cache_control"})
    id = block.required_string("tool_use_id")
    parts = _blocks(block, "content") if block.has("content") else []
    found = [part for part in parts if part.get("type") == REFERENCE]
    texts = [text_of(part) for part in parts if part.get("type") != REFERENCE]
    text = "\n".join([*texts, deferred.described(found)] if found else texts)
    failed = block.boolean("is_error", False)
    return {
        "role": "tool",
        "tool_call_id": id,
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
            case "redacted_thinking":  # encrypted
                pass
            case "tool_use":
                calls.append(_call(block))
            case "text":
                content.append(text_of(block))
            case _ if block.is_foreign("type", _BLOCKS):  # a tool that Anthropic's servers ran
                block.ignore("type", "this server runs no tools", block.get("type"))
    found: Message = {"role": "assistant", "content": "".join(content)}
    if any(reasoning):
        found["reasoning_content"] = "".join(reasoning)
    if calls:
        found["tool_calls"] = calls
    return found


def _call(block: Body) -> Message:
    block.ignore_unknown({"type", "id", "name", "input", "cache_control", "caller"})
    id, name = block.required_string("id"), block.required_string("name")
    block.object("input")
    return function_call(id, name, block.get("input", {}))


def _blocks(body: Body, field: str) -> list[Body]:
    value = body.get(field)
    if isinstance(value, str):
        return [Body({"type": "text", "text": value}, body.name(field))]
    return body.objects(field, "a string or a list of blocks")
