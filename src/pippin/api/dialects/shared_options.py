"""The fields that OpenAI's endpoints share. Knows no messages, no prompts and no tools."""

from __future__ import annotations

from dataclasses import replace

from pippin.api.model_info import ModelInfo
from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import (
    MAX_LABEL_CHARS,
    MAX_LABEL_VALUE_CHARS,
    MAX_LABELS,
    check_count,
)
from pippin.api.requests.neutral_request import Options
from pippin.api.requests.salts import read_salt
from pippin.api.requests.sampling_fields import read_priority, read_sampling
from pippin.config import LimitsConfig
from pippin.errors import RequestError, UnsupportedField
from pippin.text.bundle import SamplingDefaults


def check_model(body: Body, model: ModelInfo) -> None:
    body.require("model")
    model.check_name(body.string("model", ""))


def read_options(
    body: Body,
    model: ModelInfo,
    defaults: SamplingDefaults,
    limits: LimitsConfig,
    num_logprobs: int | None = None,
    *,
    prompt_logprobs: int | None = None,
    min_reply: int = 1,
    max_tokens_fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens"),
) -> Options:
    fields = [f for f in max_tokens_fields if body.has(f)]
    if len(fields) == 2:
        raise RequestError(
            "max_tokens and max_completion_tokens are the same thing; send one of them",
            param="max_tokens",
        )
    max_tokens_field = fields[0] if fields else max_tokens_fields[-1]
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
        salt=read_salt(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        timeout_s=_timeout(body, limits),
        most_tokens=limits.max_tokens,
        max_schema_bytes=limits.max_schema_bytes,
    )


def check_choices(num_prompts: int, options: Options, limits: LimitsConfig) -> None:
    n = options.params.n
    if num_prompts * n > limits.max_choices:
        raise RequestError(
            f"{num_prompts:,} prompts times n = {n:,} are {num_prompts * n:,} replies; "
            f"this server gives at most {limits.max_choices:,} (--max-choices)",
            param="n" if num_prompts == 1 else "prompt",
        )


def check_metadata(body: Body, field: str = "metadata") -> None:
    """Labels for the operator's bookkeeping: strings by name."""
    if not body.has(field):
        return
    metadata = Body(body.get(field), field)
    check_count(metadata, MAX_LABELS, field, "members")
    for key in metadata.fields():
        metadata.label(key, MAX_LABEL_VALUE_CHARS)
        if len(key) > MAX_LABEL_CHARS:
            raise RequestError(
                f"{field} has a name of {len(key):,} characters; at most {MAX_LABEL_CHARS:,} are "
                "allowed",
                param=field,
            )


def _timeout(body: Body, limits: LimitsConfig) -> float | None:
    """The shorter of what the request and the server say."""
    asked = body.number("timeout", 0, None, None, above_low=True)
    given = [seconds for seconds in (asked, limits.request_timeout) if seconds is not None]
    return min(given, default=None)


def _check_most(field: str, value: int, most: int, option: str) -> None:
    if value > most:
        raise RequestError(
            f"{field} is {shown(value)}; this server allows at most {most:,} ({option})",
            param=field,
        )


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
