"""`/tokenize` and `/detokenize`, as vLLM and SGLang have them. Knows no engine and no HTTP."""

from __future__ import annotations

from typing import Any

from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body
from pippin.api.requests.bounds import MAX_MESSAGES, check_count
from pippin.api.requests.chat_messages import parse_messages
from pippin.api.requests.fields import Refusal, check_fields
from pippin.api.requests.sampling_fields import are_token_ids, token_ids_in_words
from pippin.errors import RequestError
from pippin.text.bundle import TextBundle
from pippin.text.chat_template import RESERVED_VARIABLES
from pippin.text.prompt import chat_prompt, check_nbytes, nbytes_of

CHAT_ONLY = ("add_generation_prompt", "chat_template_kwargs")
TOKENIZE_HONOURED = frozenset(
    {"model", "prompt", "messages", "add_special_tokens", "return_token_strs", *CHAT_ONLY}
)
TOKENIZE_REFUSED = {
    "chat_template": Refusal("the model's own template is used"),
    "continue_final_message": Refusal("send add_generation_prompt: false", (False,)),
    "tools": Refusal("tools are not rendered here", ([],)),
}
DETOKENIZE_HONOURED = frozenset({"model", "tokens", "skip_special_tokens"})


def tokenize(fields: Any, text: TextBundle, model: ModelInfo) -> dict[str, Any]:
    """Of a list of prompts all values are lists, as SGLang's are."""
    body = Body(fields)
    check_fields(body, TOKENIZE_HONOURED, TOKENIZE_REFUSED)
    model.check_name(body.string("model", model.name))
    wants_strings = body.boolean("return_token_strs", False)
    rows = _rows(body, text, model.max_counted_bytes)
    told: list[dict[str, Any]] = [
        {
            "tokens": tokens,
            "count": len(tokens),
            "token_strs": [*map(text.tokenizer.token_text, tokens)] if wants_strings else None,
        }
        for tokens in rows
    ]
    if isinstance(body.get("prompt"), list):
        shown = {key: [row[key] for row in told] for key in ("tokens", "count", "token_strs")}
    else:
        shown = told[0]
    return {**shown, "max_model_len": model.max_len}


def detokenize(fields: Any, text: TextBundle, model: ModelInfo) -> dict[str, Any]:
    """The text, under both servers' names for it."""
    body = Body(fields)
    check_fields(body, DETOKENIZE_HONOURED, {})
    model.check_name(body.string("model", model.name))
    tokens = body.require("tokens")
    many = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    rows = tokens if many else [tokens]
    check_count(rows, MAX_MESSAGES, "tokens", "rows")
    if not all(are_token_ids(row, model.vocab_size) for row in rows):
        allowed = token_ids_in_words(model.vocab_size)
        raise body.wrong("tokens", f"a list of {allowed}, or a list of such lists")
    num_tokens = sum(map(len, rows))
    if num_tokens > model.max_counted_bytes:
        raise RequestError(
            f"tokens has {num_tokens:,} token ids; at most {model.max_counted_bytes:,} are allowed",
            param="tokens",
        )
    skips = body.boolean("skip_special_tokens", False)
    decode = text.tokenizer.decode if skips else text.tokenizer.decode_with_special
    texts = [decode(row) for row in rows]
    shown = texts if many else texts[0]
    return {"text": shown, "prompt": shown}


def _rows(body: Body, text: TextBundle, max_bytes: int) -> list[list[int]]:
    if body.has("messages") == body.has("prompt"):
        raise RequestError("one of prompt and messages is required", param="prompt")
    if body.has("messages"):
        return [_chat_tokens(body, text, max_bytes)]
    for field in CHAT_ONLY:
        if body.has(field):
            raise RequestError(f"{field} goes with messages, not with prompt", param=field)
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(item, str) for item in prompts):
        raise body.wrong("prompt", "a string or a list of strings")
    check_count(prompts, MAX_MESSAGES, "prompt", "texts")
    check_nbytes(sum(map(nbytes_of, prompts)), max_bytes, param="prompt")
    special = body.boolean("add_special_tokens", True)
    return [text.tokenizer.encode(item, add_special_tokens=special) for item in prompts]


def _chat_tokens(body: Body, text: TextBundle, max_bytes: int) -> list[int]:
    if body.boolean("add_special_tokens", False):
        field = "add_special_tokens"
        raise RequestError(f"{field} goes with prompt: a template writes its own", param=field)
    variables = body.get("chat_template_kwargs") if body.has("chat_template_kwargs") else {}
    for key in Body(variables, "chat_template_kwargs").fields():
        if key in RESERVED_VARIABLES:
            name = f"chat_template_kwargs.{key}"
            raise RequestError(f"{name} cannot be set: the server sets it", param=name)
    prompt = chat_prompt(
        parse_messages(body.get("messages")),
        text,
        add_generation_prompt=body.boolean("add_generation_prompt", True),
        variables=variables,
        max_bytes=max_bytes,
    )
    return prompt.tokens
