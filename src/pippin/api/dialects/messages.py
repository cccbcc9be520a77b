"""Anthropic's Messages: their fields, conversations and tools, and the events of a reply."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pippin.api.dialects.dialect import HOLE, BlockStream, EventTemplate, named_event
from pippin.api.job import FoldedChoice, Job
from pippin.api.model_info import RequestRules
from pippin.api.requests import fields as table
from pippin.api.requests.body import Body
from pippin.api.requests.fields import (
    MODEL,
    SAMPLING,
    SERVING,
    STREAM,
    TEMPLATE,
    TOOLS,
    FieldTable,
    ValueKind,
    conversation,
    ignored_field,
    members,
    pick,
    refused_field,
)
from pippin.api.requests.messages import (
    Message,
    function_call,
    message_bodies,
    normalise,
    text_of,
    texts_of,
)
from pippin.api.requests.neutral_request import ChatRequest, ToolUse
from pippin.api.requests.sampling_fields import read_options, template_variables
from pippin.api.requests.shared_fields import HINTS, NO_SERVICE, SAMPLERS
from pippin.api.requests.tools import (
    DeclaredTool,
    ToolChoice,
    client_tool,
    function_tool,
    is_left_out,
    tool_bodies,
    tool_use,
)
from pippin.api.served_models import ModelLease
from pippin.errors import PippinError
from pippin.text.pieces import members_of

ROLES = ("user", "assistant", "system")
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}

MESSAGES = FieldTable(
    {
        **MODEL,
        "messages": conversation(ROLES, {"type": ["string", "array"]}, "role", "content"),
        "system": ValueKind("a string or a list of text blocks", str | list[dict[str, Any]]),
        "max_tokens": table.integer_from(1),
        "stop_sequences": replace(SAMPLING["stop"], ours="stop"),
        **STREAM,
        **TOOLS,
        "tool_choice": table.OBJECT,
        "thinking": members(
            type=table.one_of("enabled", "disabled", "adaptive"),
            budget_tokens=table.integer_from(1),
            display=table.one_of("summarized", "omitted"),
        ),
        "output_config": table.lifted(
            effort=table.one_of(*EFFORTS), format=replace(table.OBJECT, ours="response_format")
        ),
        "cache_control": table.OBJECT,
        "metadata": members(user_id=table.LABEL_VALUE),
        "user_profile_id": table.LABEL,
        "context_management": table.OBJECT,
        **SAMPLING,
        **pick(TEMPLATE, "chat_template_kwargs"),
        "temperature": table.number_from(0, 1),
        **SERVING,
        **HINTS,
        **SAMPLERS,
        "mcp_servers": ignored_field(NO_SERVICE, []),
        "container": ignored_field(NO_SERVICE),
        "diagnostics": ignored_field("the log and /status have what was cached"),
        "inference_geo": ignored_field("the server runs in one place"),
        "service_tier": ignored_field("there is one tier", "auto", "standard_only"),
        "speed": ignored_field("there is one speed", "standard"),
        "fallbacks": ignored_field("there is one model"),
        "billing_policy": ignored_field("nothing is billed"),
        "fallback_credit_token": ignored_field("nothing is billed"),
        "compaction": refused_field("ask for a summary in messages"),
        "thread": refused_field("conversations are not stored; use /v1/responses"),
    },
    required=("messages", "max_tokens"),
)
COUNT_TOKENS = FieldTable(MESSAGES.fields, required=("messages",))


REFERENCE = "tool_reference"


class DeferredTools:
    def __init__(self, tools: Sequence[DeclaredTool]) -> None:
        self._tools = tools
        self._functions = {tool.name: tool.tool["function"] for tool in tools if tool.deferred}
        self._found: set[str] = set()

    def described(self, references: Sequence[Body]) -> str:
        """A result of a search, as Anthropic shows it to its models and Claude Code's tool says.

        A tool once in a conversation: many references must not make much text of a long schema.
        """
        lines = ["<functions>"]
        for reference in references:
            reference.ignore_unknown({"type", "tool_name", "cache_control"})
            name = reference.required_string("tool_name")
            known = None if name in self._found else self._functions.get(name)
            self._found.add(name)  # the list of tools has others
            described = json.dumps(known or {"name": name}, ensure_ascii=False)
            lines.append(f"<function>{described}</function>")
        return "\n".join([*lines, "</functions>"])

    def callable(self) -> list[DeclaredTool]:
        """Those in the list, and those that the conversation refers to."""
        return [tool for tool in self._tools if not tool.deferred or tool.name in self._found]


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")  # of the assistant


def parse_conversation(body: Body, deferred: DeferredTools) -> list[Message]:
    messages: list[Message] = []
    if body.has("system") and (texts := texts_of(body, "system")):
        messages.append(_said("system", texts))
    for message in message_bodies(body):
        message.ignore_unknown({"role", "content", "cache_control"})
        message.require("role")
        role = message.one_of("role", ROLES)
        if message.require("content") == [] and role != "assistant":
            raise message.wrong("content", "a string or a list of at least one block")
        if role == "assistant":
            messages.append(_assistant(message))
        elif role == "system":
            messages.append(_said(role, texts_of(message, "content")))
        else:
            messages += _user(message, deferred)
    return messages


def _said(role: str, texts: list[str]) -> Message:
    return {"role": role, "content": "\n".join(texts)}


def _user(message: Body, deferred: DeferredTools) -> Iterator[Message]:
    texts: list[str] = []
    for block in _blocks(message, "content"):
        if block.get("type") == "tool_result":
            if texts:
                yield _said("user", texts)
                texts = []
            yield _tool_result(block, deferred)
        else:
            texts.append(text_of(block))
    if texts:
        yield _said("user", texts)


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


_TOOL_FIELDS = {
    *("type", "name", "cache_control", "strict", "defer_loading", "eager_input_streaming"),
    "input_examples",
}
_KEEP_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}


def parse_message_request(
    fields: Any, rules: RequestRules, table: FieldTable = MESSAGES
) -> ChatRequest:
    body = table.read(fields, rules)
    management = body.object("context_management") or Body({})
    if management.get("edits") not in (None, [], [_KEEP_ALL_THINKING]):
        management.ignore("edits", "contexts are not edited")  # a conversation is kept whole
    options = read_options(body, rules)
    if options.max_tokens is not None:
        # Clients ask for Claude's longest reply: a shorter one that fits is as good.
        options = replace(options, max_tokens=None, most_tokens=options.max_tokens)
    deferred = DeferredTools(_tools(body))
    messages = normalise(parse_conversation(body, deferred), rules, options.salt)
    return ChatRequest(
        options=options,
        messages=messages,
        continue_final_message=messages[-1]["role"] == "assistant",
        tool_use=_tool_use(body, deferred.callable()),
        reasoning_effort=_effort(body),
        effort_field="output_config.effort" if body.has("output_config") else "thinking",
        template_variables=template_variables(body),
        leniency=body.leniency,
    )


def _effort(body: Body) -> str | None:
    thinking = body.get("thinking")
    if thinking is not None and thinking.get("type") == "disabled":
        return "none"
    effort = body.get("output_config", {}).get("effort")
    if effort is not None:
        return EFFORTS[effort]
    return None if thinking is None else "medium"


def _tools(body: Body) -> list[DeclaredTool]:
    tools, searches = [], False
    for tool in tool_bodies(body):
        kind = tool.string("type", "")
        known = client_tool(kind)
        searches |= kind.startswith("tool_search_tool_")
        if not kind or known is not None or not is_left_out(tool, ("custom",)):
            tools.append(_tool(tool, known))
    # Anthropic's search finds nothing here.
    return [replace(tool, deferred=False) for tool in tools] if searches else tools


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


def _tool(tool: Body, known: dict[str, Any] | None) -> DeclaredTool:
    """`known`: what a tool that clients run is called with."""
    described = {"max_characters"} if known else {"description", "input_schema"}
    tool.ignore_unknown(_TOOL_FIELDS | described)
    deferred = tool.boolean("defer_loading", False)
    if known is None:
        tool.require("input_schema")
        return replace(function_tool(tool, "input_schema"), deferred=deferred)
    given = {"name": tool.get("name"), "strict": tool.get("strict"), **known}
    return replace(function_tool(tool.renamed(given), "parameters"), deferred=deferred)


_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


_DELTAS = {  # by the type of a block: the type of a delta, and the member with its text
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def messages_error(error: PippinError) -> dict[str, Any]:
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class MessagesDialect(BlockStream):
    prefix, TEXT, REASONING = "msg_", "text", "thinking"

    def __init__(self, job: Job, lease: ModelLease) -> None:
        super().__init__(job, lease)
        self._num_blocks = 0
        self._delta_event: EventTemplate | None = None  # of the open block
        self._called = False
        self._opened = False

    def open(self) -> bytes:
        """Nothing, if a ping had to be sent first."""
        if self._opened:
            return b""
        self._opened = True
        message = self._message([], None) | {"usage": self._usage(output_tokens=0)}
        return named_event({"type": "message_start", "message": message})

    def ping(self) -> bytes:
        """While a prompt is computed. As from Anthropic, a message is started before."""
        return self.open() + named_event({"type": "ping"})

    def close(self) -> bytes:
        delta = {
            "stop_reason": self._stop_reason(self._finish, called=self._called),
            "stop_sequence": self._stop_sequence,
        }
        usage = self._usage(self._job.num_tokens)
        ended = self._end()
        ended += named_event({"type": "message_delta", "delta": delta, "usage": usage})
        return ended + named_event({"type": "message_stop"})

    def whole(self, choices: Sequence[FoldedChoice]) -> dict[str, Any]:
        (choice,) = choices
        text = choice.text
        blocks: list[dict[str, Any]] = []
        if text.reasoning:
            blocks.append(_thinking(text.reasoning))
        if text.content:
            blocks.append(_text(text.content))
        for call in text.calls.values():
            given = _input(call.arguments, cut=choice.finish == "length")
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        stop_reason = self._stop_reason(choice.finish, called=bool(text.calls))
        return self._message(blocks, stop_reason) | {
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(self._job.num_tokens),
        }

    def error(self, error: PippinError) -> bytes:
        return named_event(messages_error(error))

    def _begin(self, kind: str) -> bytes:
        return self._start(_thinking("") if kind == self.REASONING else _text(""))

    def _begin_call(self, id: str, name: str) -> bytes:
        return self._start({"type": "tool_use", "id": id, "name": name, "input": {}})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._open_kind = block["type"]
        self._delta_event = None
        start = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return named_event(start)

    def _delta(self, text: str) -> bytes:
        if self._delta_event is None:
            kind, member = _DELTAS[self._open_kind or ""]
            delta = {"type": kind, member: HOLE}
            event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
            self._delta_event = EventTemplate(named_event(event))
        return self._delta_event.fill(text)

    def _end_call(self) -> bytes:
        self._called = True
        return self._end()

    def _end(self, *, complete: bool = True) -> bytes:
        if self._open_kind is None:
            return b""
        self._open_kind = None
        self._num_blocks += 1
        return named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _message(self, blocks: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "type": "message",
            "role": "assistant",
            "model": self._job.model,
            "content": blocks,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            **self._job.omitted,
        }

    @property
    def _stop_sequence(self) -> str | None:
        return self._job.sequences[0].stop_string

    def _stop_reason(self, finish: str | None, *, called: bool) -> str:
        if finish == "length":
            return "max_tokens"
        if self._stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if called else "end_turn"

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        cached = self._job.num_cached()
        return {
            "input_tokens": self._job.num_prompt_tokens - cached,  # Anthropic counts them apart
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }


def _input(arguments: str, *, cut: bool) -> Any:
    """As it was written; of a call that was cut, what can be read."""
    return members_of(arguments) if cut else msgspec.Raw((arguments or "{}").encode())


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}  # nothing here is signed


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
