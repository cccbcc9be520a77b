"""The items of OpenAI's Responses API as messages that templates want. Knows no other field.

What the assistant did in one turn (reasoning, text, calls) are several items there, one message
here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pippin.api.dialects.responses.reasoning import reasoning_of
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_MESSAGES, check_count
from pippin.api.requests.content.chat_messages import Message, function_call, read_arguments
from pippin.api.requests.content.text_parts import texts_of
from pippin.api.requests.custom_tools import arguments_of
from pippin.api.requests.shell_tools import (
    CALLS,
    OUTPUTS,
    SHELL_TOOLS,
    arguments_of_call,
    output_text,
)
from pippin.api.requests.tools import full_name
from pippin.errors import RequestError, cut

Item = dict[str, Any]
FindItems = Callable[[list[str]], Mapping[str, Item]]  # by their ids, among those that are stored
_ROLES = ("system", "developer", "user", "assistant")
_REFERENCE = "item_reference"
_TEXTS = ("content", "reasoning_content")  # of a message
_IGNORED = {"id", "status", "annotations", "logprobs", "phase"}  # as replies carry them
_IGNORED_OF_SHELLS = {*_IGNORED, "caller", "created_by", "environment"}
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    **{kind: SHELL_TOOLS[name].prefix for kind, name in CALLS.items()},
    **{kind: f"{SHELL_TOOLS[name].prefix}o" for kind, name in OUTPUTS.items()},
}


def read_items(body: Body, find_items: FindItems, max_bytes: int) -> list[Item]:
    """The input as items with ids. `max_bytes`: of references, each as often as it occurs."""
    given = body.require("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.wrong("input", "a string or a list of at least one item")
    check_count(given, MAX_MESSAGES, "input", "items")
    bodies = [Body(item, f"input[{number}]") for number, item in enumerate(given)]
    references = [_reference(item) for item in bodies if item.get("type") == _REFERENCE]
    stored = find_items(references) if references else {}
    _check_bytes(references, stored, max_bytes)
    return [_whole_item(item, stored) for item in bodies]


def messages_of(body: Body, before: Sequence[Item], items: Sequence[Item]) -> list[Message]:
    """A conversation. Items `before` it were checked when they were sent."""
    check_count([*before, *items], MAX_MESSAGES, "input", "items, with previous ones,")
    messages: list[Message] = []
    if body.has("instructions"):
        messages.append({"role": "system", "content": body.get("instructions")})
    for name, part in (("previous", before), ("input", items)):
        for number, item in enumerate(part):
            _add(Body(item, f"{name}[{number}]", body.leniency), messages)
    if not messages:
        raise body.error("input", "has no item that a model can be shown")
    return [_joined(message) for message in messages]


def _reference(item: Body) -> str:
    item.ignore_unknown({"type", "id"})
    return item.required_string("id")


def _check_bytes(references: list[str], stored: Mapping[str, Item], max_bytes: int) -> None:
    sizes = {id: len(msgspec.json.encode(item)) for id, item in stored.items()}
    nbytes = sum(sizes.get(id, 0) for id in references)
    if nbytes > max_bytes:
        raise RequestError(
            f"input refers to {nbytes:,} bytes of items; at most {max_bytes:,} are allowed "
            "(--max-body-bytes)",
            param="input",
        )


def _whole_item(item: Body, stored: Mapping[str, Item]) -> Item:
    """The item itself, if it is a reference; with an id, and its text as parts."""
    fields = {field: item.get(field) for field in item.fields()}
    kind = fields.get("type") or "message"
    if kind == _REFERENCE:
        return _referred(item, stored)
    id = item.string("id", None) or f"{_PREFIXES.get(str(kind), 'item')}_{uuid.uuid4().hex}"
    content = fields.get("content")
    if kind == "message" and isinstance(content, str):
        part_kind = "output_text" if fields.get("role") == "assistant" else "input_text"
        fields["content"] = [{"type": part_kind, "text": content}]
    return {**fields, "type": kind, "id": id}


def _referred(item: Body, stored: Mapping[str, Item]) -> Item:
    id = item.string("id", "")
    found = stored.get(id)
    if found is None:
        raise RequestError(
            f"Item with id '{cut(id)}' not found. Items are not persisted when `store` is set to "
            "false, and dropped when too many are stored.",
            param=item.name("id"),
        )
    return found


def _add(item: Body, messages: list[Message]) -> None:
    match item.get("type"):
        case None | "message":
            _add_message(item, messages)
        case "reasoning":
            item.ignore_unknown({"type", "summary", "content", "encrypted_content", *_IGNORED})
            _turn(messages).setdefault("reasoning_content", []).append(reasoning_of(item))
        case "function_call" | "custom_tool_call":
            _turn(messages).setdefault("tool_calls", []).append(_call(item))
        case str(kind) if kind in CALLS:
            _turn(messages).setdefault("tool_calls", []).append(_shell_call(item, CALLS[kind]))
        case str(kind) if kind in OUTPUTS:
            messages.append(_shell_output(item))
        case "function_call_output" | "custom_tool_call_output":
            item.ignore_unknown({"type", "call_id", "output", *_IGNORED})
            call_id = item.required_string("call_id")
            content = _text(item, "output")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case _:
            if item.is_foreign("type", (*_PREFIXES, _REFERENCE)):  # of a tool that OpenAI runs
                name = f"{item.path.partition('[')[0]}[].type"
                why = "this server runs no tools"
                item.leniency.ignore(name, why, item.required_string("type"))


def _add_message(item: Body, messages: list[Message]) -> None:
    item.ignore_unknown({"type", "role", "content", *_IGNORED})
    item.require("role")
    role = item.one_of("role", _ROLES)
    text = _text(item, "content")
    if role == "assistant":
        _turn(messages)["content"].append(text)
    else:
        messages.append({"role": role, "content": text})


def _turn(messages: list[Message]) -> Message:
    """The assistant's message that is being put together, its texts as lists of parts."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _joined(message: Message) -> Message:
    parts = {field: "".join(value) for field, value in message.items() if field in _TEXTS}
    return {**message, **parts}


def _text(item: Body, field: str) -> str:
    item.require(field)
    return "".join(texts_of(item, field))


def _call(item: Body) -> Message:
    text_field = "input" if item.get("type") == "custom_tool_call" else "arguments"
    item.ignore_unknown({"type", "call_id", "name", text_field, "namespace", *_IGNORED})
    id, name = item.required_string("call_id"), item.required_string("name")
    if text_field == "input":
        arguments = arguments_of(item.string(text_field, ""))
    else:
        arguments = read_arguments(item)
    if (namespace := item.string("namespace", None)) is not None:
        name = full_name(namespace, name)
    return function_call(id, name, arguments)


def _shell_call(item: Body, name: str) -> Message:
    item.ignore_unknown({"type", "call_id", SHELL_TOOLS[name].field, *_IGNORED_OF_SHELLS})
    return function_call(item.required_string("call_id"), name, arguments_of_call(item))


def _shell_output(item: Body) -> Message:
    """By OpenAI's types one of `local_shell` has the id of the call as its own."""
    item.ignore_unknown({"type", "call_id", "output", "max_output_length", *_IGNORED_OF_SHELLS})
    by_id = item.get("type") == "local_shell_call_output" and not item.has("call_id")
    call_id = item.required_string("id" if by_id else "call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": output_text(item)}
