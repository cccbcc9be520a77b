"""`/tokenize` and `/detokenize`, as vLLM and SGLang have them."""

from __future__ import annotations

from typing import Any

from pippin.api.fields.openai import ROLES
from pippin.api.fields.table import (
    BOOLEAN,
    MODEL,
    TEMPLATE,
    FieldTable,
    conversation,
    refused_field,
    rows_of,
    texts_or_ids,
)
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import MAX_MESSAGES, Body, check_count
from pippin.api.requests.messages import parse_messages
from pippin.api.requests.sampling_fields import continues_final_message, template_variables
from pippin.errors import RequestError
from pippin.text.bundle import TextBundle
from pippin.text.prompt import chat_prompt, check_nbytes, nbytes_of

TOKENIZE = FieldTable(
    {
        **MODEL,
        "prompt": texts_or_ids(ids=False),
        "messages": conversation(ROLES, {}, "role"),
        "add_special_tokens": BOOLEAN,
        **TEMPLATE,
        "return_token_strs": BOOLEAN,
        "chat_template": refused_field("the model's own template is used"),
        "tools": refused_field("tools are not rendered here", []),
    }
)
DETOKENIZE = FieldTable(
    {**MODEL, "tokens": texts_or_ids(texts=False), "skip_special_tokens": BOOLEAN},
    required=("tokens",),
)


def tokenize(fields: Any, text: TextBundle, rules: RequestRules) -> dict[str, Any]:
    """Of a list of prompts all values are lists, as SGLang's are."""
    body = rules.body(fields)
    TOKENIZE.check(body, rules)
    wants_strings = body.get("return_token_strs", False)
    replies: list[dict[str, Any]] = [
        {
            "tokens": tokens,
            "count": len(tokens),
            "token_strs": [*map(text.tokenizer.token_text, tokens)] if wants_strings else None,
        }
        for tokens in _rows(body, text, rules.model.max_counted_bytes)
    ]
    if isinstance(body.get("prompt"), list):
        reply = {key: [row[key] for row in replies] for key in ("tokens", "count", "token_strs")}
    else:
        reply = replies[0]
    return {**reply, "max_model_len": rules.model.max_len}


def detokenize(fields: Any, text: TextBundle, rules: RequestRules) -> dict[str, Any]:
    """The text, under both servers' names for it."""
    body = rules.body(fields)
    DETOKENIZE.check(body, rules)
    tokens = body.get("tokens")
    rows = rows_of(tokens)
    check_count(rows, MAX_MESSAGES, "tokens", "rows")
    num_tokens, most = sum(map(len, rows)), rules.model.max_counted_bytes
    if num_tokens > most:
        raise body.error("tokens", f"has {num_tokens:,} token ids; at most {most:,} are allowed")
    skips = body.get("skip_special_tokens", False)
    decode = text.tokenizer.decode if skips else text.tokenizer.decode_with_special
    texts = [decode(row) for row in rows]
    reply = texts if rows is tokens else texts[0]
    return {"text": reply, "prompt": reply}


def _rows(body: Body, text: TextBundle, max_bytes: int) -> list[list[int]]:
    if body.has("messages") == body.has("prompt"):
        raise RequestError("one of prompt and messages is required", param="prompt")
    if body.has("messages"):
        return [_chat_tokens(body, text, max_bytes)]
    for field in TEMPLATE:
        if body.has(field):
            raise body.error(field, "needs messages, and is not used with prompt")
    prompts = rows_of(body.get("prompt"))
    check_count(prompts, MAX_MESSAGES, "prompt", "texts")
    check_nbytes(sum(map(nbytes_of, prompts)), max_bytes, param="prompt")
    special = body.get("add_special_tokens", True)
    return [text.tokenizer.encode(item, add_special_tokens=special) for item in prompts]


def _chat_tokens(body: Body, text: TextBundle, max_bytes: int) -> list[int]:
    if body.get("add_special_tokens"):
        raise body.error("add_special_tokens", "needs prompt: a template adds its own")
    return chat_prompt(
        parse_messages(body),
        text,
        add_generation_prompt=body.get("add_generation_prompt", True),
        continue_final_message=continues_final_message(body),
        variables=template_variables(body),
        max_bytes=max_bytes,
    ).tokens
