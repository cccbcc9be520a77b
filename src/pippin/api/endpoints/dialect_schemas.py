"""Requests of Responses and Messages as JSON Schema: for the OpenAPI document. Checks nothing."""

from __future__ import annotations

from collections.abc import Mapping

from pippin.api.dialects.messages.conversation import ROLES
from pippin.api.dialects.messages.message_request import EFFORTS as MESSAGES_EFFORTS
from pippin.api.dialects.messages.message_request import THINKING
from pippin.api.dialects.responses.response_request import INCLUDED, SUMMARIES
from pippin.api.endpoints.schema_words import (
    BOOLEAN,
    OBJECT,
    OBJECTS,
    STRING,
    Schema,
    body_of,
    integer,
    label,
    number,
    object_of,
    some,
)
from pippin.api.endpoints.stored_responses import ITEMS_PATH, MAX_LISTED, ORDERS, PATH
from pippin.api.requests.bounds import MAX_LABEL_VALUE_CHARS, MAX_MESSAGES
from pippin.api.requests.fields import (
    MESSAGES_HONOURED,
    MESSAGES_REFUSED,
    RESPONSES_HONOURED,
    RESPONSES_REFUSED,
)
from pippin.api.requests.reasoning_effort import EFFORTS

_SUMMARY: Schema = {"enum": list(SUMMARIES)}


def responses_schema(fields: Mapping[str, Schema]) -> Schema:
    own = {
        "input": {"anyOf": [STRING, some(OBJECT) | {"maxItems": MAX_MESSAGES}]},
        "instructions": STRING,
        "max_output_tokens": integer(1),
        "reasoning": object_of(
            effort={"enum": list(EFFORTS)}, summary=_SUMMARY, generate_summary=_SUMMARY, context={}
        ),
        "text": object_of(format=OBJECT, verbosity={"enum": ["medium"]}),
        "include": {"type": "array", "items": {"enum": list(INCLUDED)}},
        "store": BOOLEAN,
        "previous_response_id": label(),
        "client_metadata": fields["metadata"],
    }
    return body_of(
        RESPONSES_HONOURED, RESPONSES_REFUSED, {**fields, **own}, required=("model", "input")
    )


def messages_schemas(fields: Mapping[str, Schema]) -> dict[str, Schema]:
    """Of messages, and of counting their tokens: that may leave out how many come back."""
    message = {
        "type": "object",
        "properties": {"role": {"enum": list(ROLES)}, "content": {"type": ["string", "array"]}},
        "required": ["role", "content"],
    }
    own = {
        "messages": some(message) | {"maxItems": MAX_MESSAGES},
        "system": {"anyOf": [STRING, OBJECTS]},
        "stop_sequences": fields["stop"],
        "temperature": number(0, 1),
        "tool_choice": OBJECT,
        "thinking": object_of(
            type={"enum": list(THINKING)}, budget_tokens=integer(1), display=STRING
        ),
        "output_config": object_of(effort={"enum": list(MESSAGES_EFFORTS)}, format=OBJECT),
        "metadata": object_of(user_id=label(MAX_LABEL_VALUE_CHARS)),
        **dict.fromkeys(("cache_control", "context_management"), OBJECT),
        "user_profile_id": label(),
    }
    known = {**fields, **own}
    path = "/v1/messages"
    return {
        path: body_of(
            MESSAGES_HONOURED,
            MESSAGES_REFUSED,
            known,
            required=("model", "messages", "max_tokens"),
        ),
        f"{path}/count_tokens": body_of(
            MESSAGES_HONOURED, MESSAGES_REFUSED, known, required=("model", "messages")
        ),
    }


def query_schemas() -> dict[str, dict[str, Schema]]:
    """What stands behind a question mark, by path."""
    include = {"type": "string", "enum": list(INCLUDED)}
    return {
        PATH: {"include": include, "stream": {"type": "string", "enum": ["false"]}},
        ITEMS_PATH: {
            "include": include,
            "limit": integer(1, MAX_LISTED),
            "order": {"type": "string", "enum": list(ORDERS)},
            "after": STRING,
        },
    }
