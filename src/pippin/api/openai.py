"""JSON in, typed requests out: after this nobody looks at user input again. Knows no tokens.

Every documented field is honoured or refused by name (see `fields.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pippin.api.body import Body, shown
from pippin.api.chat_messages import parse_messages
from pippin.api.fields import (
    CHAT_HONOURED,
    CHAT_REFUSED,
    COMPLETION_HONOURED,
    COMPLETION_REFUSED,
    check_fields,
)
from pippin.api.model_info import ModelInfo
from pippin.api.parameters import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    are_token_ids,
    read_priority,
    read_sampling,
    token_ids_in_words,
)
from pippin.config import LimitsConfig
from pippin.errors import RequestError, UnsupportedField
from pippin.text.bundle import SamplingDefaults
from pippin.text.chat_template import RESERVED_VARIABLES
from pippin.types import SamplingParams


@dataclass(frozen=True)
class Options:
    """What both endpoints share. `params.max_tokens` means nothing yet: see `max_tokens`."""

    params: SamplingParams
    max_tokens: int | None  # None: as many as fit
    max_tokens_field: str
    priority: int
    stream: bool
    include_usage: bool
    timeout_s: float | None
    most_tokens: int | None  # that the server gives a reply


@dataclass(frozen=True)
class ChatRequest:
    options: Options
    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    template_variables: dict[str, Any]


@dataclass(frozen=True)
class CompletionRequest:
    options: Options
    prompts: list[str] | list[list[int]]
    echo: bool


def parse_chat(
    fields: Any, model: ModelInfo, defaults: SamplingDefaults, limits: LimitsConfig
) -> ChatRequest:
    body = Body(fields)
    check_fields(body, CHAT_HONOURED, CHAT_REFUSED)
    _check_model(body, model)
    _check_metadata(body)
    for label in ("user", "safety_identifier", "prompt_cache_key"):
        body.string(label, None)
    messages = parse_messages(body.require("messages"))
    num_logprobs = _chat_logprobs(body)
    options = _options(
        body, model, defaults, limits, num_logprobs, prompt_logprobs=None, min_reply=1
    )
    _check_choices(1, options, limits)
    return ChatRequest(
        options=options,
        messages=messages,
        add_generation_prompt=body.boolean("add_generation_prompt", True),
        template_variables=_template_variables(body),
    )


def parse_completion(
    fields: Any, model: ModelInfo, defaults: SamplingDefaults, limits: LimitsConfig
) -> CompletionRequest:
    body = Body(fields)
    check_fields(body, COMPLETION_HONOURED, COMPLETION_REFUSED)
    _check_model(body, model)
    body.string("user", None)
    prompts = _parse_prompts(body, model)
    echo = body.boolean("echo", False)
    num_logprobs = body.integer("logprobs", 0, MAX_LOGPROBS, None)
    options = _options(
        body,
        model,
        defaults,
        limits,
        num_logprobs,
        prompt_logprobs=num_logprobs if echo else None,
        min_reply=0 if echo else 1,  # with echo, none is a way to score a text
    )
    _check_choices(len(prompts), options, limits)
    best_of = body.integer("best_of", 1, MAX_CHOICES, options.params.n)
    if best_of != options.params.n:
        raise UnsupportedField(
            f"best_of is {best_of} and n is {options.params.n}; "
            "choosing among more replies than are returned is not supported",
            param="best_of",
        )
    return CompletionRequest(options, prompts, echo)


def _check_model(body: Body, model: ModelInfo) -> None:
    body.require("model")
    model.check_name(body.string("model", ""))


def _options(
    body: Body,
    model: ModelInfo,
    defaults: SamplingDefaults,
    limits: LimitsConfig,
    num_logprobs: int | None,
    *,
    prompt_logprobs: int | None,
    min_reply: int,
) -> Options:
    fields = [f for f in ("max_completion_tokens", "max_tokens") if body.has(f)]
    if len(fields) == 2:
        raise RequestError(
            "max_tokens and max_completion_tokens are the same thing; send one of them",
            param="max_tokens",
        )
    max_tokens_field = fields[0] if fields else "max_tokens"
    max_tokens = body.integer(max_tokens_field, min_reply, None, None)
    if max_tokens is not None and limits.max_tokens is not None:
        _check_most(max_tokens_field, max_tokens, limits.max_tokens, "--max-tokens")
    stream = body.boolean("stream", False)
    return Options(
        params=replace(
            read_sampling(body, model.vocab_size, defaults, limits, max_tokens=max_tokens),
            logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        priority=read_priority(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        timeout_s=_timeout(body, limits),
        most_tokens=limits.max_tokens,
    )


def _timeout(body: Body, limits: LimitsConfig) -> float | None:
    """The shorter of what the request and the server say."""
    asked = body.number("timeout", 0, None, None, above_low=True)
    given = [seconds for seconds in (asked, limits.request_timeout) if seconds is not None]
    return min(given, default=None)


def _check_choices(num_prompts: int, options: Options, limits: LimitsConfig) -> None:
    n = options.params.n
    if num_prompts * n > limits.max_choices:
        raise RequestError(
            f"{num_prompts:,} prompts times n = {n:,} are {num_prompts * n:,} replies; "
            f"this server gives at most {limits.max_choices:,} (--max-choices)",
            param="n" if num_prompts == 1 else "prompt",
        )


def _check_most(field: str, value: int, most: int, option: str) -> None:
    if value > most:
        raise RequestError(
            f"{field} is {shown(value)}; this server allows at most {most:,} ({option})",
            param=field,
        )


def _chat_logprobs(body: Body) -> int | None:
    wanted = body.boolean("logprobs", False)
    num_top = body.integer("top_logprobs", 0, MAX_LOGPROBS, None)
    if num_top is not None and not wanted:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (num_top or 0) if wanted else None


def _include_usage(body: Body, stream: bool) -> bool:
    if not body.has("stream_options"):
        return False
    if not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    options = Body(body.get("stream_options"), "stream_options")
    options.check_known({"include_usage", "include_obfuscation"})
    if options.boolean("include_obfuscation", False):
        name = options.name("include_obfuscation")
        raise UnsupportedField(f"{name} is not supported: send false", param=name)
    return options.boolean("include_usage", False)


def _parse_prompts(body: Body, model: ModelInfo) -> list[str] | list[list[int]]:
    prompt = body.require("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, str) for item in prompt):
            return list(prompt)
        if are_token_ids(prompt, model.vocab_size):
            return [prompt]
        if all(are_token_ids(item, model.vocab_size) for item in prompt):
            return list(prompt)
    raise body.wrong(
        "prompt",
        f"a string, a list of strings, a list of {token_ids_in_words(model.vocab_size)}, "
        "or a list of such lists",
    )


def _check_metadata(body: Body) -> None:
    if not body.has("metadata"):
        return
    metadata = Body(body.get("metadata"), "metadata")
    for key in metadata.fields():
        metadata.string(key, None)


def _template_variables(body: Body) -> dict[str, Any]:
    if not body.has("chat_template_kwargs"):
        return {}
    variables = Body(body.get("chat_template_kwargs"), "chat_template_kwargs")
    for key in variables.fields():
        if key in RESERVED_VARIABLES:
            name = variables.name(key)
            raise RequestError(f"{name} cannot be set: the server sets it", param=name)
    return {key: variables.get(key) for key in variables.fields()}
