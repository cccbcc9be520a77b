"""Sampling parameters and options, from the fields of requests and from `LLM`'s callers.

Both are checked by the same table, so that a value that is refused in one is refused in the other.
"""

from __future__ import annotations

import json
import numbers
from dataclasses import replace
from typing import Any

import msgspec

from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.fields import (
    CHOICES,
    MAX_LOGPROBS,
    SAMPLING,
    SERVING,
    STRUCTURE,
    FieldTable,
    ValueKind,
    integer_from,
)
from pippin.api.requests.neutral_request import Options
from pippin.config import LimitsConfig
from pippin.decode.json_schema import expressed
from pippin.decode.size import check_nesting_of
from pippin.errors import RequestError
from pippin.text.bundle import SamplingDefaults
from pippin.text.chat_template import RESERVED_VARIABLES
from pippin.types import GrammarSpec, SamplingParams

ANY_OBJECT = json.dumps({"type": "object"})
_STRUCTURES = ("response_format", "json_schema", "regex", "ebnf")
_SAMPLED = (*SAMPLING, *CHOICES)


def read_structure(body: Body, rules: RequestRules) -> GrammarSpec | None:
    format, asked = body.object("response_format"), [f for f in _STRUCTURES if body.has(f)]
    if format is not None and format.get("type") == "text":
        asked.remove("response_format")
    if len(asked) > 1:
        raise body.error(asked[1], f"and {asked[0]} both constrain the reply; send one of them")
    if not asked:
        return None
    (field,), is_strict = asked, rules.strict_fields
    if format is not None and field == "response_format":
        text, asks_strict = _response_format(format)
        is_strict = is_strict or asks_strict
    else:
        text = _schema(body, field) if field == "json_schema" else body.required_string(field)
    kind: Any = "json_schema" if field == "response_format" else field
    spec = GrammarSpec(kind, text)
    nbytes, most = len(text.encode()), rules.limits.max_schema_bytes
    if nbytes > most:
        limit = f"at most {most:,} are allowed (--max-schema-bytes)"
        raise body.error(field, f"has {nbytes:,} bytes; {limit}")
    return spec if is_strict or spec.kind != "json_schema" else _lenient(spec, body, field)


def _lenient(spec: GrammarSpec, body: Body, field: str) -> GrammarSpec:
    """Without keywords that cannot be enforced: they are listed in a header of the response."""
    try:
        schema = json.loads(spec.text)
    except (ValueError, RecursionError):
        return spec  # found out, and named, where grammars are compiled
    if not isinstance(schema, dict):
        return spec
    check_nesting_of(schema, field)
    left_out: dict[str, None] = {}
    found = expressed(schema, lambda keyword: left_out.setdefault(keyword))
    if not left_out:
        return spec
    for keyword in left_out:
        body.leniency.ignore(f"{body.name(field)}.{keyword}", "it cannot be enforced")
    return GrammarSpec("json_schema", json.dumps(found, ensure_ascii=False))


def _response_format(given: Body) -> tuple[str, bool]:
    """The schema, and whether all of it must be enforced. It may stand beside its type."""
    kind, described = given.get("type"), given.object("json_schema")
    if described is None or kind == "json_object":
        given.check_known({"type", "json_schema", "name", "description", "schema", "strict"})
        described = given
    else:
        given.check_known({"type", "json_schema", "schema"})
        described.check_known({"name", "description", "schema", "strict"})
        described.required_string("name")
    if kind == "json_schema" and not given.has("schema"):
        given.require("json_schema")
    if given.has("schema") and given.has("json_schema"):  # llama.cpp's and SGLang's place of it
        raise given.error("schema", "and json_schema are the same; send one of them")
    described.string("description", None)
    is_strict = described.boolean("strict", False)
    if kind == "json_object" and not given.has("schema"):
        return ANY_OBJECT, is_strict
    if kind not in ("json_object", "json_schema"):
        raise given.unsupported("type", "text, json_object and json_schema are supported")
    described.require("schema")
    return _schema(described, "schema"), is_strict


def _schema(body: Body, field: str) -> str:
    """An object, or the JSON of one as SGLang takes it."""
    value = body.get(field)
    if isinstance(value, dict):
        check_nesting_of(value, body.name(field))
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return value
    raise body.wrong(field, "a JSON Schema: an object, or its JSON")


def effort_of(body: Body) -> tuple[str | None, str]:
    """How much to reason, and the field that sets it: the first of those that are sent."""
    reasoning = body.object("reasoning") or Body({})
    thinking = body.get("thinking")
    for holder, field in (
        *((body, "reasoning_effort"), (reasoning, "effort"), (reasoning, "enabled")),
        *((body, "thinking"), (body, "enable_thinking"), (body, "think")),
    ):
        if not holder.has(field):
            continue
        value = holder.get(field)
        if field == "thinking" and isinstance(thinking, dict):
            value = _thinking(body.required_object("thinking"))
        if isinstance(value, bool):
            value = "medium" if value else "none"
        return value, holder.name(field)
    return None, "reasoning_effort"


def _thinking(thinking: Body) -> bool | None:
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive", "auto"))
    if thinking.has("budget_tokens"):
        thinking.ignore("budget_tokens", "reasoning has no budget of its own")
    return None if kind in (None, "auto") else kind != "disabled"


PARAMS = FieldTable(
    {
        **SAMPLING,
        **CHOICES,
        **STRUCTURE,
        **SERVING,
        "max_tokens": ValueKind(type=int),
        "logprobs": integer_from(0, MAX_LOGPROBS),
        "prompt_logprobs": integer_from(0, MAX_LOGPROBS),
    }
)


def check_sampling(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """A Python caller's parameters, read as a request with these fields would be."""
    model = ModelInfo("", max_len=0, vocab_size=vocab_size, created_s=0)
    rules = RequestRules(model, SamplingDefaults(), LimitsConfig(), strict_fields=True)
    body = _read_params(params, "params", rules)
    max_tokens = body.get("max_tokens", SamplingParams.max_tokens)
    least = 0 if body.has("prompt_logprobs") else 1  # no reply is a way to score a prompt
    if max_tokens < least:
        raise body.wrong("max_tokens", integer_from(least).words(rules))
    read = read_sampling(body, rules, body.get("logprobs"), body.get("prompt_logprobs"))
    return replace(read, max_tokens=max_tokens)


def check_priority(priority: int) -> int:
    rules = RequestRules(ModelInfo("", 0, 1, 0), SamplingDefaults(), LimitsConfig())
    return int(_read_params({"priority": priority}, "priority", rules).get("priority", 0))


def _read_params(given: Any, name: str, rules: RequestRules) -> Body:
    try:
        fields = msgspec.to_builtins(given, str_keys=True, enc_hook=_plain_number)
    except TypeError as error:
        raise RequestError(f"{name} cannot be read: {error}", param=name) from error
    return PARAMS.read({name: fields[name] for name in fields.keys() & PARAMS.fields.keys()}, rules)


def _plain_number(value: Any) -> Any:
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{value!r} is no number, string or list of these")


def read_sampling(
    body: Body, rules: RequestRules, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Without the length of a reply, which depends on its prompt."""
    structure = read_structure(body, rules)
    max_tokens = body.get("max_tokens")
    if max_tokens is not None and body.get("min_tokens", 0) > max_tokens:
        raise body.wrong("min_tokens", integer_from(0, max_tokens).words(rules))
    fields: dict[str, Any] = {**vars(rules.defaults), "top_k": max(0, rules.defaults.top_k)}
    fields |= {name: body.get(name) for name in _SAMPLED if body.has(name)}
    if structure is not None:
        fields[structure.kind] = structure.text
    return SamplingParams(**fields, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def read_options(
    body: Body,
    rules: RequestRules,
    logprobs: int | None = None,
    *,
    prompt_logprobs: int | None = None,
) -> Options:
    most, max_tokens = rules.limits.max_tokens, body.get("max_tokens")
    if max_tokens is not None and most is not None and max_tokens > most:
        raise body.wrong("max_tokens", f"at most {most:,} (--max-tokens)")
    if (kept_tokens := body.get("truncate_prompt_tokens")) == 0:
        raise body.wrong("truncate_prompt_tokens", "an integer of at least 1, or -1")
    if body.has("stream_options") and not body.get("stream"):
        raise body.error("stream_options", "needs stream to be true")
    return Options(
        params=read_sampling(body, rules, logprobs, prompt_logprobs),
        max_tokens=max_tokens,
        max_tokens_field=body.name("max_tokens"),
        priority=body.get("priority", 0),
        salt=body.get("cache_salt", b""),
        stream=body.get("stream", False),
        include_usage=bool(body.get("stream_options", {}).get("include_usage")),
        timeout_s=read_timeout(body, rules.limits),
        most_tokens=most,
        max_schema_bytes=rules.limits.max_schema_bytes,
        kept_tokens=kept_tokens,
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


def num_logprobs(body: Body) -> int | None:
    """Of dialects with a switch and a number."""
    wanted = body.get("logprobs", False)
    if body.has("top_logprobs") and not wanted:
        raise body.error("top_logprobs", "needs logprobs to be true")
    return body.get("top_logprobs", 0) if wanted else None


def template_variables(body: Body) -> dict[str, Any]:
    variables: dict[str, Any] = body.get("chat_template_kwargs", {})
    for key in variables.keys() & RESERVED_VARIABLES:
        name = f"{body.name('chat_template_kwargs')}.{key}"
        raise RequestError(f"{name} cannot be set: the server sets it", param=name)
    return variables
