"""The fields of `/tokenize` and `/detokenize`, as vLLM and SGLang have them. Knows no tokenizer."""

from __future__ import annotations

from pippin.api.fields.kinds import BOOLEAN, Rows
from pippin.api.fields.openai import ROLES
from pippin.api.fields.shared import MODEL, TEMPLATE, conversation
from pippin.api.fields.table import FieldTable, refused

TOKENIZE = FieldTable(
    {
        **MODEL,
        "prompt": Rows(ids=False),
        "messages": conversation(ROLES, {}, "role"),
        "add_special_tokens": BOOLEAN,
        **TEMPLATE,
        "return_token_strs": BOOLEAN,
        "chat_template": refused("the model's own template is used"),
        "continue_final_message": refused("send add_generation_prompt: false", False),
        "tools": refused("tools are not rendered here", []),
    }
)
DETOKENIZE = FieldTable(
    {**MODEL, "tokens": Rows(texts=False), "skip_special_tokens": BOOLEAN}, required=("tokens",)
)
