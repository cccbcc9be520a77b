"""The options that dialects share, from checked fields. Knows no messages, prompts or tools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.neutral_request import Options
from pippin.api.requests.salts import read_salt
from pippin.api.requests.sampling_fields import read_sampling
from pippin.config import LimitsConfig
from pippin.errors import RequestError
from pippin.text.templates.chat_template import RESERVED_VARIABLES


def read_options(
    body: Body,
    rules: RequestRules,
    num_logprobs: int | None = None,
    *,
    prompt_logprobs: int | None = None,
    max_tokens_field: str = "max_tokens",
) -> Options:
    most = rules.limits.max_tokens
    max_tokens = body.get(max_tokens_field)
    if max_tokens is not None and most is not None and max_tokens > most:
        raise body.wrong(max_tokens_field, f"at most {most:,} (--max-tokens)")
    if body.has("stream_options") and not body.get("stream"):
        raise body.error("stream_options", "needs stream to be true")
    return Options(
        params=replace(
            read_sampling(body, rules, max_tokens=max_tokens),
            logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        ),
        max_tokens=max_tokens,
        max_tokens_field=max_tokens_field,
        priority=body.get("priority", 0),
        salt=read_salt(body),
        stream=body.get("stream", False),
        include_usage=bool(body.get("stream_options", {}).get("include_usage")),
        timeout_s=read_timeout(body, rules.limits),
        most_tokens=most,
        max_schema_bytes=rules.limits.max_schema_bytes,
        kept_tokens=body.get("truncate_prompt_tokens"),
        add_special_tokens=body.get("add_special_tokens"),
    )


def read_timeout(body: Body, limits: LimitsConfig) -> float | None:
    """The shorter of the request's and the server's."""
    given = [s for s in (body.get("timeout"), limits.request_timeout) if s is not None]
    return min(map(float, given), default=None)


def check_choices(num_prompts: int, options: Options, limits: LimitsConfig) -> None:
    n = options.params.n
    if num_prompts * n > limits.max_choices:
        raise RequestError(
            f"{num_prompts:,} prompts times n = {n:,} are {num_prompts * n:,} replies; "
            f"at most {limits.max_choices:,} are allowed (--max-choices)",
            param="n" if num_prompts == 1 else "prompt",
        )


def continues_final_message(body: Body) -> bool:
    """A reply that is continued has no generation prompt: as in vLLM, both are an error."""
    continues: bool = body.get("continue_final_message", False)
    if continues and body.get("add_generation_prompt"):
        raise body.error(
            "continue_final_message", "and add_generation_prompt are both true; send one of them"
        )
    return continues


def template_variables(body: Body) -> dict[str, Any]:
    variables = body.object("chat_template_kwargs") or Body({})
    for key in variables.fields():
        if key in RESERVED_VARIABLES:
            raise variables.error(key, "cannot be set: the server sets it")
    return {key: variables.get(key) for key in variables.fields()}
