"""The fields of Anthropic's Messages. Knows no value's use."""

from __future__ import annotations

from pippin.api.fields import kinds
from pippin.api.fields.kinds import Kind
from pippin.api.fields.openai import NO_SERVICE
from pippin.api.fields.shared import MODEL, SAMPLING, SERVING, STREAM, TOOLS, conversation, pick
from pippin.api.fields.table import FieldTable, members, refused

ROLES = ("user", "assistant", "system")
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}

MESSAGES = FieldTable(
    {
        **MODEL,
        "messages": conversation(ROLES, {"type": ["string", "array"]}, "role", "content"),
        "system": Kind(
            "a string or a list of text blocks",
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        ),
        "max_tokens": kinds.integer(1),
        "stop_sequences": kinds.StopStrings(),
        **STREAM,
        **TOOLS,
        "tool_choice": kinds.OBJECT,
        "thinking": members(
            type=kinds.one_of("enabled", "disabled", "adaptive"),
            budget_tokens=kinds.integer(1),
            display=kinds.one_of("summarized", "omitted"),
        ),
        "output_config": members(effort=kinds.one_of(*EFFORTS), format=kinds.OBJECT),
        "cache_control": kinds.OBJECT,
        "metadata": members(user_id=kinds.LABEL_VALUE),
        "user_profile_id": kinds.LABEL,
        "context_management": kinds.OBJECT,
        **pick(SAMPLING, "top_p", "top_k"),
        "temperature": kinds.number(0, 1),
        **SERVING,
        "container": refused(NO_SERVICE),
        "diagnostics": refused("the log and /status have what was cached"),
        "inference_geo": refused("the server runs in one place"),
        "service_tier": refused("there is one tier", "auto", "standard_only"),
        "speed": refused("there is one speed", "standard"),
    },
    required=("model", "messages", "max_tokens"),
)
COUNT_TOKENS = FieldTable(MESSAGES.fields, required=("model", "messages"))
