"""A request of OpenAI's Responses API as a neutral one. Knows no replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pippin.api.dialects.openai_tools import read_responses_tools
from pippin.api.dialects.responses.items import Item, messages_of, read_items
from pippin.api.dialects.responses.reasoning import ReasoningForm
from pippin.api.dialects.responses.response_store import ResponseStore, StoredTurn
from pippin.api.dialects.shared_options import read_options, template_variables
from pippin.api.fields.openai import INPUT_TOKENS, RESPONSES
from pippin.api.fields.shared import SAMPLING
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.extensions import effort_of, with_our_names
from pippin.api.requests.neutral_request import ChatRequest

_SAME_FIELDS = (
    *("stream", "stream_options", "max_output_tokens", "priority", "timeout", "cache_salt"),
    *(name for name in SAMPLING if name != "n"),
)


@dataclass(frozen=True)
class ResponsesRequest:
    chat: ChatRequest
    echo: dict[str, Any]  # what the response repeats of the request
    items: list[Item]  # of this turn
    previous: StoredTurn | None  # that it continues
    store: bool
    reasoning: ReasoningForm


def parse_responses_request(
    fields: Any, rules: RequestRules, stored: ResponseStore
) -> ResponsesRequest:
    body = rules.body(fields)
    RESPONSES.check(body, rules)
    return _read_request(body, rules, stored)


def parse_counted_request(fields: Any, rules: RequestRules, stored: ResponseStore) -> ChatRequest:
    """A request whose prompt is only to be counted."""
    body = rules.body(fields)
    INPUT_TOKENS.check(body, rules)
    return _read_request(body, rules, stored).chat


def _read_request(body: Body, rules: RequestRules, stored: ResponseStore) -> ResponsesRequest:
    effort, effort_field = effort_of(body)
    body = with_our_names(body)
    store = body.get("store", stored.enabled)
    if store and not stored.enabled:
        body.ignore("store", "this server stores no responses (--stored-responses)")
        store = False
    options = read_options(_openai_body(body), rules, max_tokens_field="max_output_tokens")
    previous_id = body.get("previous_response_id")
    previous = None if previous_id is None else stored.previous(previous_id)
    items = read_items(body, stored.items, rules.limits.max_body_bytes)
    before = [] if previous is None else previous.items()
    chat = ChatRequest(
        options=options,
        messages=messages_of(body, before, items),
        tool_use=read_responses_tools(body),
        reasoning_effort=effort,
        template_variables=template_variables(body),
        messages_field="input",
        effort_field=effort_field,
        leniency=body.leniency,
    )
    echo = {
        "frequency_penalty": options.params.frequency_penalty,
        "instructions": body.get("instructions"),
        "max_output_tokens": options.max_tokens,
        "max_tool_calls": None,  # a reply ends with its calls: clients run them
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": chat.tool_use.parallel,
        "presence_penalty": options.params.presence_penalty,
        "previous_response_id": previous_id,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": chat.reasoning_effort, "summary": _summary(body)},
        "safety_identifier": body.get("safety_identifier"),
        "store": store,
        "temperature": options.params.temperature,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": options.params.top_p,
        "user": body.get("user"),
    }
    return ResponsesRequest(chat, echo, items, previous, store, ReasoningForm.asked(body))


def _summary(body: Body) -> str | None:
    reasoning = body.object("reasoning") or Body({})
    return reasoning.string("summary", None) or reasoning.string("generate_summary", None)


def _openai_body(body: Body) -> Body:
    """The fields that chat completions have too, by their names there."""
    fields = {field: body.get(field) for field in _SAME_FIELDS}
    text = body.object("text") or Body({})
    if (format := text.object("format")) is not None:
        fields["response_format"] = _response_format(format)
    return body.renamed(fields)


def _response_format(format: Body) -> dict[str, Any]:
    if format.get("type") != "json_schema":
        return {"type": format.get("type")}
    format.check_known({"type", "name", "description", "schema", "strict"})
    inner = {field: format.get(field) for field in format.fields() if field != "type"}
    return {"type": "json_schema", "json_schema": inner}
