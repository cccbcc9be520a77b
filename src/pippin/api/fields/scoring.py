"""The fields of `/v1/rerank` (Jina's, Cohere's) and `/v1/score` (vLLM's). Knows no model."""

from __future__ import annotations

from typing import Any

from pippin.api.fields import shared
from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import FieldTable, ignored_field, refused_field
from pippin.api.fields.value_kinds import ValueKind
from pippin.api.requests.bounds import MAX_MESSAGES

_WHOLE = "texts are not shortened"
_DOCUMENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    ]
}


# vLLM's names of the two texts of a pair, the newest first: those of one row are sent together.
PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def _are_documents(value: Any) -> bool:
    if isinstance(value, list):
        return 0 < len(value) <= MAX_MESSAGES and all(map(_is_document, value))
    return isinstance(value, str)


def _is_document(value: Any) -> bool:
    return isinstance(value.get("text") if isinstance(value, dict) else value, str)


_SHARED: shared.Fields = {
    **shared.MODEL,
    "instruction": kinds.STRING,
    **shared.USER,
    **shared.SERVING,
    "max_tokens_per_query": kinds.integer_from(0),
    "max_tokens_per_doc": kinds.integer_from(0),
    "truncate_prompt_tokens": refused_field(_WHOLE),
    "use_activation": refused_field("scores are probabilities or cosines", True),
}
RERANK = FieldTable(
    {
        "query": ValueKind("a string, or an object with a text", _DOCUMENT, _is_document),
        "documents": ValueKind(
            f"a string, or a list of 1 to {MAX_MESSAGES:,} strings or objects with a text",
            {"anyOf": [{"type": "string"}, kinds.some(_DOCUMENT, MAX_MESSAGES)]},
            _are_documents,
        ),
        "top_n": kinds.integer_from(0),
        "return_documents": kinds.BOOLEAN,
        **_SHARED,
        "max_chunks_per_doc": ignored_field("a document is one text"),
        "rank_fields": refused_field("documents have one text", ["text"]),
    },
    required=("query", "documents"),
)
SCORE = FieldTable({name: kinds.TextsOrIds(ids=False) for pair in PAIRS for name in pair} | _SHARED)
