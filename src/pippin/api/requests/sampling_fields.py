"""The rules of sampling and priority, for requests and for `LLM`'s callers. Knows no endpoint.

Both are read by the same lines, so that what is refused there is refused here, in the same words.
"""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import msgspec

from pippin.api.requests.body import Body, shown
from pippin.api.requests.bounds import MAX_STOP_TOKEN_IDS, check_count
from pippin.api.requests.structured import read_structure
from pippin.config import LimitsConfig
from pippin.errors import RequestError
from pippin.text.bundle import SamplingDefaults
from pippin.types import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_PRIORITY = 1_000
MAX_ID_DIGITS = 18  # far more than any vocabulary needs; Python refuses to read thousands


def check_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """A Python caller's parameters, read as a request with these fields would be."""
    body = _as_body(params, "params")
    prompt_logprobs = body.integer("prompt_logprobs", 0, MAX_LOGPROBS, None)
    least = 1 if prompt_logprobs is None else 0  # none is a way to score a text
    max_tokens = body.integer("max_tokens", least, None, SamplingParams.max_tokens)
    return replace(
        read_sampling(body, vocab_size, SamplingDefaults(), LimitsConfig(), max_tokens=max_tokens),
        max_tokens=max_tokens,
        logprobs=body.integer("logprobs", 0, MAX_LOGPROBS, None),
        prompt_logprobs=prompt_logprobs,
    )


def check_priority(priority: int) -> int:
    return read_priority(_as_body({"priority": priority}, "priority"))


def read_priority(body: Body) -> int:
    """Those with a higher one start first."""
    return body.integer("priority", -MAX_PRIORITY, MAX_PRIORITY, 0)


def read_sampling(
    body: Body,
    vocab_size: int,
    defaults: SamplingDefaults,
    limits: LimitsConfig,
    *,
    max_tokens: int | None,
) -> SamplingParams:
    """All but the length of the reply and logprobs, which endpoints spell in their own ways."""
    structure = read_structure(body, limits.max_schema_bytes)
    return SamplingParams(
        min_tokens=body.integer("min_tokens", 0, max_tokens, 0),
        temperature=body.number("temperature", 0, 2, defaults.temperature),
        top_k=max(0, body.integer("top_k", -1, None, defaults.top_k)),  # -1 is "all" elsewhere
        top_p=body.number("top_p", 0, 1, defaults.top_p, above_low=True),
        min_p=body.number("min_p", 0, 1, defaults.min_p),
        repetition_penalty=body.number(
            "repetition_penalty", 0, None, defaults.repetition_penalty, above_low=True
        ),
        presence_penalty=body.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=body.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(body, vocab_size, limits.max_logit_bias),
        seed=body.integer("seed", -MAX_SEED - 1, MAX_SEED - MAX_CHOICES, None),
        stop=body.strings("stop", limits.max_stops, "--max-stops"),
        stop_token_ids=_stop_token_ids(body, vocab_size),
        ignore_eos=body.boolean("ignore_eos", False),
        n=body.integer("n", 1, MAX_CHOICES, 1),
        json_schema=structure.json_schema,
        regex=structure.regex,
        ebnf=structure.ebnf,
    )


def are_token_ids(value: Any, vocab_size: int) -> bool:
    if not isinstance(value, list | tuple):
        return False
    # Millions may be sent: no line of Python for each.
    return set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) < vocab_size)
    )


def token_ids_in_words(vocab_size: int) -> str:
    return f"token ids from 0 to {vocab_size - 1:,}"


def _logit_bias(body: Body, vocab_size: int, most: int) -> dict[int, float]:
    if not body.has("logit_bias"):
        return {}
    biases = Body(body.get("logit_bias"), "logit_bias")
    if len(biases) > most:
        raise RequestError(
            f"logit_bias names {len(biases):,} tokens; at most {most:,} are allowed "
            "(--max-logit-bias)",
            param="logit_bias",
        )
    for key in biases.fields():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS or int(key) >= vocab_size:
            raise RequestError(
                f"logit_bias has the key {shown(key)}; "
                f"keys must be {token_ids_in_words(vocab_size)}",
                param="logit_bias",
            )
    return {int(key): biases.number(key, -100, 100, 0.0) for key in biases.fields()}


def _stop_token_ids(body: Body, vocab_size: int) -> tuple[int, ...]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return ()
    if isinstance(ids, list | tuple):
        check_count(ids, MAX_STOP_TOKEN_IDS, body.name("stop_token_ids"), "token ids")
    if not are_token_ids(ids, vocab_size):
        raise body.wrong("stop_token_ids", f"a list of {token_ids_in_words(vocab_size)}")
    return tuple(dict.fromkeys(ids))


def _as_body(given: Any, name: str) -> Body:
    try:
        return Body(msgspec.to_builtins(given, str_keys=True, enc_hook=_plain_number))
    except TypeError as error:
        raise RequestError(f"{name} cannot be read: {error}", param=name) from error


def _plain_number(value: Any) -> Any:
    """Python's own, of numpy's and others'."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is no number, string or list of these")
