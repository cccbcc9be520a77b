"""A request of OpenAI's Responses API as a neutral one. Knows no replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pippin.api.dialects.openai_tools import read_responses_tools
from pippin.api.dialects.responses.items import Item, messages_of, read_items
from pippin.api.dialects.responses.response_store import ResponseStore, StoredTurn
from pippin.api.dialects.shared_options import check_metadata, check_model, read_options
from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body, shown
from pippin.api.requests.fields import RESPONSES_HONOURED, RESPONSES_REFUSED, check_fields
from pippin.api.requests.neutral_request import ChatRequest
from pippin.api.requests.reasoning_effort import EFFORTS
from pippin.config import LimitsConfig
from pippin.errors import UnsupportedField
from pippin.text.bundle import SamplingDefaults

_SAME_FIELDS = ("temperature", "top_p", "stream", "stream_options", "max_output_tokens")
_EXTRA_FIELDS = ("seed", "top_k", "min_p", "stop", "priority", "timeout", "cache_salt")
SUMMARIES = ("auto", "concise", "detailed")
INCLUDED = ("reasoning.encrypted_content",)  # reasoning comes in the open: there is none to add


@dataclass(frozen=True)
class ResponsesRequest:
    chat: ChatRequest
    echo: dict[str, Any]  # what the response repeats of the request
    items: list[Item]  # of this turn
    previous: StoredTurn | None  # that it goes on from
    store: bool


def parse_responses_request(
    fields: Any,
    model: ModelInfo,
    defaults: SamplingDefaults,
    limits: LimitsConfig,
    *,
    stored: ResponseStore,
) -> ResponsesRequest:
    body = Body(fields)
    check_fields(body, RESPONSES_HONOURED, RESPONSES_REFUSED)
    check_model(body, model)
    check_metadata(body)
    check_metadata(body, "client_metadata")
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        body.label(label)
    store = _store(body, stored)
    _check_include(body)
    options = read_options(
        _openai_body(body), model, defaults, limits, max_tokens_fields=("max_output_tokens",)
    )
    previous = None
    if (previous_id := body.label("previous_response_id")) is not None:
        previous = stored.previous(previous_id)
    items = read_items(body, stored.items, limits.max_body_bytes)
    before = [] if previous is None else previous.items()
    chat = ChatRequest(
        options=options,
        messages=messages_of(body.string("instructions", None), before, items),
        tool_use=read_responses_tools(body),
        reasoning_effort=_effort(body),
        messages_field="input",
        effort_field="reasoning.effort",
    )
    echo = {
        "instructions": body.get("instructions"),
        "max_output_tokens": options.max_tokens,
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": chat.tool_use.parallel,
        "previous_response_id": previous_id,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "store": store,
        "temperature": options.params.temperature,
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": options.params.top_p,
        "user": body.get("user"),
    }
    return ResponsesRequest(chat, echo, items, previous, store)


def _store(body: Body, stored: ResponseStore) -> bool:
    """Whether to keep the response: yes if nothing is said, as with OpenAI."""
    if body.boolean("store", stored.enabled) and not stored.enabled:
        raise UnsupportedField(
            "store is true, and this server stores no responses (--stored-responses)",
            param="store",
        )
    return body.boolean("store", stored.enabled)


def _openai_body(body: Body) -> Body:
    """The fields that chat completions have too, by their names there."""
    fields = {f: body.get(f) for f in (*_SAME_FIELDS, *_EXTRA_FIELDS) if body.has(f)}
    if body.has("text"):
        text = Body(body.get("text"), "text")
        text.check_known({"format", "verbosity"})
        if text.get("verbosity") not in (None, "medium"):
            raise UnsupportedField(
                'text.verbosity is not supported: say it in the prompt (only "medium" is accepted)',
                param="text.verbosity",
            )
        if text.has("format"):
            fields["response_format"] = _response_format(Body(text.get("format"), "text.format"))
    return Body(fields)


def _response_format(format: Body) -> dict[str, Any]:
    """The same words, but for one level of nesting."""
    if format.get("type") != "json_schema":
        return {"type": format.get("type")}
    format.check_known({"type", "name", "description", "schema", "strict"})
    inner = {field: format.get(field) for field in format.fields() if field != "type"}
    return {"type": "json_schema", "json_schema": inner}


def _effort(body: Body) -> str | None:
    if not body.has("reasoning"):
        return None
    reasoning = Body(body.get("reasoning"), "reasoning")
    reasoning.check_known({"effort", "summary", "generate_summary", "context"})
    for field in ("summary", "generate_summary"):
        # All of the reasoning is there to be read: a summary is not written besides.
        reasoning.one_of(field, SUMMARIES)
    return reasoning.one_of("effort", EFFORTS)


def _check_include(body: Body) -> None:
    included = body.get("include") if body.has("include") else []
    if not isinstance(included, list):
        raise body.wrong("include", "a list")
    for item in included:
        if item not in INCLUDED:
            raise UnsupportedField(f"include: {shown(item)} is not supported", param="include")
