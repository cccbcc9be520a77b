"""The fields of Anthropic's Messages. Knows no value's use."""

from __future__ import annotations

from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.extensions import HINTS, SAMPLERS
from pippin.api.fields.openai import NO_SERVICE
from pippin.api.fields.shared import (
    MODEL,
    SAMPLING,
    SERVING,
    STREAM,
    TEMPLATE,
    TOOLS,
    conversation,
    pick,
)
from pippin.api.fields.table import FieldTable, ignored_field, members, refused_field
from pippin.api.fields.value_kinds import ValueKind

ROLES = ("user", "assistant", "system")
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}

MESSAGES = FieldTable(
    {
        **MODEL,
        "messages": conversation(ROLES, {"type": ["string", "array"]}, "role", "content"),
        "system": ValueKind(
            "a string or a list of text blocks",
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        ),
        "max_tokens": kinds.integer_from(1),
        "stop_sequences": kinds.StopStrings(),
        **STREAM,
        **TOOLS,
        "tool_choice": kinds.OBJECT,
        "thinking": members(
            type=kinds.one_of("enabled", "disabled", "adaptive"),
            budget_tokens=kinds.integer_from(1),
            display=kinds.one_of("summarized", "omitted"),
        ),
        "output_config": members(effort=kinds.one_of(*EFFORTS), format=kinds.OBJECT),
        "cache_control": kinds.OBJECT,
        "metadata": members(user_id=kinds.LABEL_VALUE),
        "user_profile_id": kinds.LABEL,
        "context_management": kinds.OBJECT,
        **pick(
            SAMPLING,
            *("top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty"),
            *("frequency_penalty", "logit_bias", "stop_token_ids", "min_tokens", "ignore_eos"),
            "speculate",
        ),
        **pick(TEMPLATE, "chat_template_kwargs"),
        "temperature": kinds.number_from(0, 1),
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
