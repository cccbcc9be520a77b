"""Sampling parameters and priority, from requests and from `LLM`'s callers. Knows no endpoint.

Both are checked by the same table, so that a value that is refused in one is refused in the other.
"""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import msgspec

from pippin.api.fields.shared import MAX_LOGPROBS, SAMPLING, SERVING
from pippin.api.fields.table import FieldTable
from pippin.api.fields.value_kinds import integer_from
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.structured import read_structure
from pippin.config import LimitsConfig
from pippin.errors import RequestError
from pippin.text.bundle import SamplingDefaults
from pippin.types import SamplingParams

PARAMS = FieldTable(
    {
        **SAMPLING,
        **SERVING,
        "logprobs": integer_from(0, MAX_LOGPROBS),
        "prompt_logprobs": integer_from(0, MAX_LOGPROBS),
    }
)


def check_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """A Python caller's parameters, read as a request with these fields would be."""
    body = _checked_body(params, "params", vocab_size)
    max_tokens = body.get("max_tokens", SamplingParams.max_tokens)
    least = 0 if body.has("prompt_logprobs") else 1  # no reply is a way to score a prompt
    FieldTable({"max_tokens": integer_from(least)}).check_values(body, _rules(vocab_size))
    return replace(
        read_sampling(body, _rules(vocab_size), max_tokens=max_tokens),
        max_tokens=max_tokens,
        logprobs=body.get("logprobs"),
        prompt_logprobs=body.get("prompt_logprobs"),
    )


def check_priority(priority: int) -> int:
    return int(_checked_body({"priority": priority}, "priority").get("priority", 0))


def read_sampling(body: Body, rules: RequestRules, *, max_tokens: int | None) -> SamplingParams:
    """Of checked fields. Reply length and logprobs have other names in each dialect."""
    defaults = rules.defaults
    max_bytes, strict = rules.limits.max_schema_bytes, rules.strict_fields
    structure = read_structure(body, max_bytes, strict=strict)
    if max_tokens is not None and body.get("min_tokens", 0) > max_tokens:
        raise body.wrong("min_tokens", integer_from(0, max_tokens).text)
    constraint: dict[str, Any] = {} if structure is None else {structure.kind: structure.text}
    stop = body.get("stop", ())
    return SamplingParams(
        min_tokens=body.get("min_tokens", 0),
        temperature=float(body.get("temperature", defaults.temperature)),
        top_k=max(0, body.get("top_k", defaults.top_k)),  # -1 is "all" elsewhere
        top_p=float(body.get("top_p", defaults.top_p)),
        min_p=float(body.get("min_p", defaults.min_p)),
        repetition_penalty=float(body.get("repetition_penalty", defaults.repetition_penalty)),
        presence_penalty=float(body.get("presence_penalty", 0)),
        frequency_penalty=float(body.get("frequency_penalty", 0)),
        logit_bias={int(id): float(b or 0) for id, b in body.get("logit_bias", {}).items()},
        seed=body.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(dict.fromkeys(body.get("stop_token_ids", ()))),
        ignore_eos=body.get("ignore_eos", False),
        speculate=body.get("speculate", True),
        n=body.get("n", 1),
        **constraint,
    )


def _checked_body(given: Any, name: str, vocab_size: int = 1) -> Body:
    try:
        body = Body(msgspec.to_builtins(given, str_keys=True, enc_hook=_plain_number))
    except TypeError as error:
        raise RequestError(f"{name} cannot be read: {error}", param=name) from error
    PARAMS.check_values(body, _rules(vocab_size))
    return body


def _rules(vocab_size: int) -> RequestRules:
    model = ModelInfo("", max_len=0, vocab_size=vocab_size, created_s=0)
    return RequestRules(model, SamplingDefaults(), LimitsConfig(), strict_fields=True)


def _plain_number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is no number, string or list of these")
