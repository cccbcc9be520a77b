"""The fields of `/tokenize` and `/detokenize`, as vLLM and SGLang have them. Knows no tokenizer."""

from __future__ import annotations

from pippin.api.fields.openai import ROLES
from pippin.api.fields.shared import MODEL, TEMPLATE, conversation
from pippin.api.fields.table import FieldTable, refused_field
from pippin.api.fields.value_kinds import BOOLEAN, TextsOrIds

TOKENIZE = FieldTable(
    {
        **MODEL,
        "prompt": TextsOrIds(ids=False),
        "messages": conversation(ROLES, {}, "role"),
        "add_special_tokens": BOOLEAN,
        **TEMPLATE,
        "return_token_strs": BOOLEAN,
        "chat_template": refused_field("the model's own template is used"),
        "tools": refused_field("tools are not rendered here", []),
    }
)
DETOKENIZE = FieldTable(
    {**MODEL, "tokens": TextsOrIds(texts=False), "skip_special_tokens": BOOLEAN},
    required=("tokens",),
)
