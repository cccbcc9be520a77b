"""Ollama's requests as neutral ones. Knows no replies.

A request without messages or a prompt loads its model, or unloads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pippin.api.dialects.openai_tools import read_chat_tools
from pippin.api.dialects.shared_options import read_options
from pippin.api.fields.ollama import CHAT, GENERATE, THINK_LEVELS
from pippin.api.fields.openai import ROLES
from pippin.api.fields.table import FieldTable
from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.content.chat_messages import Message, function_call, message_bodies
from pippin.api.requests.content.omitted_parts import text_in_place_of
from pippin.api.requests.leniency import Leniency
from pippin.api.requests.neutral_request import ChatRequest, CompletionRequest, Gap, Options
from pippin.durations import parse_duration
from pippin.text.tokenizer import Tokenizer

_SAME_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "stop", "speculate", "ignore_eos")
_SAME_PENALTIES = ("presence_penalty", "frequency_penalty")
_MESSAGE_FIELDS = frozenset(
    {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id"}
)
_SERVING = ("timeout", "priority", "cache_salt")


@dataclass(frozen=True)
class LoadRequest:
    """For no reply, but for a model in memory, or out of it."""

    done_reason: str
    leniency: Leniency
    timeout_s: float | None = None

    def keep_apart(self, owner_salt: bytes) -> None:
        """It has no prefixes."""

    def facts(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        return {}


def parse_ollama_chat(fields: Any, rules: RequestRules) -> ChatRequest | LoadRequest:
    body = rules.body(fields)
    CHAT.check(body, rules)
    options, tool_use = _options(body, rules), read_chat_tools(body)
    if not body.get("messages"):
        return _load(body)
    messages = [_message(message) for message in message_bodies(body)]
    final = messages[-1]
    is_prefill = final["role"] == "assistant" and not final.get("tool_calls")
    return ChatRequest(
        options=options,
        messages=messages,
        continue_final_message=is_prefill,
        tool_use=tool_use,
        reasoning_effort=_effort(body),
        effort_field="think",
        leniency=body.leniency,
    )


def parse_generate(
    fields: Any, rules: RequestRules
) -> ChatRequest | CompletionRequest | LoadRequest:
    body = rules.body(fields)
    GENERATE.check(body, rules)
    options = _options(body, rules)
    suffix = body.get("suffix")
    if not body.get("prompt") and not suffix:
        return _load(body)
    prompt = _with_images(body, "prompt")
    if suffix or body.get("raw"):
        for field in ("system", "context"):
            if body.get(field):
                beside = "suffix" if suffix else "raw"
                raise body.error(field, f"is not used with {beside}: write it into the prompt")
        gap = Gap(suffix) if suffix else None
        return CompletionRequest(options, [prompt], False, body.leniency, gap)
    messages = [{"role": "user", "content": prompt}]
    if system := body.get("system"):
        messages.insert(0, {"role": "system", "content": system})
    return ChatRequest(
        options=options,
        messages=messages,
        reasoning_effort=_effort(body),
        previous_tokens=tuple(body.get("context", ())),
        messages_field="prompt",
        effort_field="think",
        leniency=body.leniency,
    )


def parse_embed(fields: Any, rules: RequestRules, table: FieldTable) -> tuple[Body, bool]:
    """A request for embeddings with OpenAI's names, and whether to cut long texts."""
    body = rules.body(fields)
    table.check(body, rules)
    texts = body.get("input" if "input" in table.fields else "prompt")
    same = {field: body.get(field) for field in (*_SERVING, "dimensions")}
    renamed = body.renamed({**same, "model": rules.model.name, "input": texts})
    return renamed, body.get("truncate", True)


def _load(body: Body) -> LoadRequest:
    is_unload = parse_duration(body.get("keep_alive")) == 0
    return LoadRequest("unload" if is_unload else "load", body.leniency)


def _options(body: Body, rules: RequestRules) -> Options:
    given = body.object("options") or body.renamed({})
    if body.has("top_logprobs") and not body.get("logprobs"):
        raise body.error("top_logprobs", "needs logprobs to be true")
    same = {name: given.get(name) for name in (*_SAME_OPTIONS, *_SAME_PENALTIES)}
    seed, num_predict = given.get("seed"), given.get("num_predict", -1)
    renamed = {
        **same,
        "seed": None if seed == -1 else seed,  # Ollama's word for "any"
        "repetition_penalty": given.get("repeat_penalty"),
        "stream": body.get("stream", True),
        **_format(body),
        **{name: body.get(name) for name in _SERVING},
    }
    num_logprobs = body.get("top_logprobs", 0) if body.get("logprobs") else None
    options = read_options(body.renamed(renamed), rules, num_logprobs)
    # 0 and less mean "as many as fit", and more than fits is cut down to it, as in Ollama.
    most = [n for n in (num_predict, options.most_tokens) if n is not None and n > 0]
    return replace(options, most_tokens=min(most, default=None), max_tokens_field="num_predict")


def _format(body: Body) -> dict[str, Any]:
    format = body.get("format")
    if format == "json":
        return {"response_format": {"type": "json_object"}}
    return {"json_schema": format} if isinstance(format, dict) else {}


def _effort(body: Body) -> str | None:
    think = body.get("think")
    if isinstance(think, bool):
        return "medium" if think else "none"
    return None if think is None else THINK_LEVELS[think]


def _message(body: Body) -> Message:
    body.require("role")
    body.ignore_unknown(_MESSAGE_FIELDS)
    message: Message = {
        "role": body.one_of("role", ROLES),
        "content": _with_images(body, "content"),
    }
    for field, name in (
        ("thinking", "reasoning_content"),
        ("tool_name", "name"),
        ("tool_call_id", "tool_call_id"),
    ):
        if text := body.string(field, ""):
            message[name] = text
    if body.get("tool_calls"):
        if message["role"] != "assistant":
            raise body.error("tool_calls", "must be in a message of the assistant")
        message["tool_calls"] = [_call(call) for call in body.objects("tool_calls")]
    return message


def _with_images(body: Body, field: str) -> str:
    """A text behind what takes the place of its images, which are base64."""
    if not isinstance(images := body.get("images", []), list):
        raise body.wrong("images", "a list of strings")
    path, leniency = body.name("images"), body.leniency
    parts = [Body({"type": "image", "data": data}, path, leniency) for data in images]
    return "\n".join([*map(text_in_place_of, parts), body.string(field, "")])


def _call(call: Body) -> Message:
    function = call.required_object("function")
    if function.has("arguments"):
        function.required_object("arguments")
    name, arguments = function.required_string("name"), function.get("arguments", {})
    return function_call(call.string("id", ""), name, arguments)
