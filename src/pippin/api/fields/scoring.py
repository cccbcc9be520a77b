"""The fields of `/v1/rerank` (Jina's, Cohere's) and `/v1/score` (vLLM's). Knows no model."""

from __future__ import annotations

from typing import Any

from pippin.api.fields import shared
from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import FieldTable, refused_field
from pippin.api.fields.value_kinds import ValueKind
from pippin.api.requests.bounds import MAX_MESSAGES

_WHOLE = "texts are not shortened"
_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}


def _are_documents(value: Any) -> bool:
    return (
        isinstance(value, list) and 0 < len(value) <= MAX_MESSAGES and all(map(_is_document, value))
    )


def _is_document(value: Any) -> bool:
    return isinstance(value.get("text") if isinstance(value, dict) else value, str)


_SHARED: shared.Fields = {
    **shared.MODEL,
    "instruction": kinds.STRING,
    **shared.USER,
    **shared.SERVING,
    "truncate_prompt_tokens": refused_field(_WHOLE),
    "use_activation": refused_field("scores are probabilities or cosines", True),
}
RERANK = FieldTable(
    {
        "query": kinds.STRING,
        "documents": ValueKind(
            f"a list of 1 to {MAX_MESSAGES:,} strings, or objects with a text",
            kinds.some(_DOCUMENT, MAX_MESSAGES),
            _are_documents,
        ),
        "top_n": kinds.integer_from(0),
        "return_documents": kinds.BOOLEAN,
        **_SHARED,
        "max_tokens_per_doc": refused_field(_WHOLE),
        "max_chunks_per_doc": refused_field(_WHOLE),
        "rank_fields": refused_field("documents have one text", ["text"]),
    },
    required=("query", "documents"),
)
SCORE = FieldTable(
    {"text_1": kinds.TextsOrIds(ids=False), "text_2": kinds.TextsOrIds(ids=False), **_SHARED},
    required=("text_1", "text_2"),
)
