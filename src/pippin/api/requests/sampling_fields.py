"""Sampling parameters and priority, from requests and from `LLM`'s callers. Knows no endpoint.

Both are checked by the same table, so that a value that is refused in one is refused in the other.
"""

from __future__ import annotations

import json
import numbers
from dataclasses import replace
from typing import Any

import msgspec

from pippin.api.fields.openai import RENAMED
from pippin.api.fields.table import MAX_LOGPROBS, SAMPLING, SERVING, FieldTable, integer_from
from pippin.api.model_info import ModelInfo, RequestRules
from pippin.api.requests.body import Body, read_salt
from pippin.api.requests.neutral_request import Options
from pippin.config import LimitsConfig
from pippin.decode.json_schema import expressed
from pippin.decode.size import check_nesting_of
from pippin.errors import RequestError
from pippin.text.bundle import SamplingDefaults
from pippin.text.chat_template import RESERVED_VARIABLES
from pippin.types import GrammarSpec, SamplingParams

FIELDS = ("response_format", "json_schema", "regex", "ebnf")
ANY_OBJECT = json.dumps({"type": "object"})


def read_structure(body: Body, max_bytes: int, *, strict: bool) -> GrammarSpec | None:
    """`strict`: a keyword of a schema that cannot be enforced stays, and is refused."""
    asked = [field for field in FIELDS if _asks(body, field)]
    if len(asked) > 1:
        raise body.error(asked[1], f"and {asked[0]} both constrain the reply; send one of them")
    if not asked:
        return None
    field = asked[0]
    spec = _read(body, field)
    nbytes = len(spec.text.encode())
    if nbytes > max_bytes:
        limit = f"at most {max_bytes:,} are allowed (--max-schema-bytes)"
        raise body.error(field, f"has {nbytes:,} bytes; {limit}")
    if spec.kind != "json_schema" or strict or _is_strict(body, field):
        return spec
    return _lenient(spec, body, field)


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


def _is_strict(body: Body, field: str) -> bool:
    if field != "response_format":
        return False
    described = body.required_object(field).object("json_schema")
    return described is not None and described.boolean("strict", False)


def _read(body: Body, field: str) -> GrammarSpec:
    if field == "response_format":
        return GrammarSpec("json_schema", _response_format(body.required_object(field)))
    if field == "json_schema":
        return GrammarSpec("json_schema", _schema(body, field))
    return GrammarSpec("regex" if field == "regex" else "ebnf", body.required_string(field))


def _asks(body: Body, field: str) -> bool:
    if field == "response_format" and body.has(field):
        return bool(body.required_object(field).get("type") != "text")
    return body.has(field)


def _response_format(given: Body) -> str:
    given.check_known({"type", "json_schema", "schema"})
    kind = given.get("type")
    if given.has("schema") and kind in ("json_object", "json_schema"):  # llama.cpp's and SGLang's
        if given.has("json_schema"):
            raise given.error("schema", "and json_schema are the same; send one of them")
        return _schema(given, "schema")
    if kind == "json_object":
        return ANY_OBJECT
    if kind != "json_schema":
        raise given.unsupported("type", "text, json_object and json_schema are supported")
    described = given.required_object("json_schema")
    described.check_known({"name", "description", "schema", "strict"})
    described.required_string("name")
    described.string("description", None)
    described.boolean("strict", False)
    described.require("schema")
    return _schema(described, "schema")


def _schema(body: Body, field: str) -> str:
    """An object, or the JSON of one as SGLang takes it."""
    value = body.get(field)
    if isinstance(value, dict):
        check_nesting_of(value, body.name(field))
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return value
    raise body.wrong(field, "a JSON Schema: an object, or its JSON")


_STRUCTURES = {"json": "json_schema", "regex": "regex", "grammar": "ebnf"}


def with_our_names(body: Body) -> Body:
    """Of a checked request."""
    found = {name: body.get(name) for name in RENAMED if body.has(name)}
    fields = {name: body.get(name) for name in body.fields() if name not in found}
    if found.get("n_predict") == -1:
        del found["n_predict"]
    for name, value in found.items():
        _put(body, fields, RENAMED[name], name, value)
    if body.has("guided_choice"):
        _put(body, fields, "regex", "guided_choice", _any_of(body, "guided_choice"))
    if (structure := body.object("structured_outputs")) is not None:
        for name in filter(structure.has, _STRUCTURES):
            _put(body, fields, _STRUCTURES[name], structure.name(name), structure.get(name))
        if structure.has("choice"):
            choices = _any_of(structure, "choice")
            _put(body, fields, "regex", structure.name("choice"), choices)
        if structure.get("json_object"):
            name = structure.name("json_object")
            _put(body, fields, "json_schema", name, ANY_OBJECT)
    return body.renamed(fields)


def effort_of(body: Body) -> tuple[str | None, str]:
    """How much to reason, and the field that sets it: the first of those that are sent."""
    if body.has("reasoning_effort"):
        return body.get("reasoning_effort"), "reasoning_effort"
    if (reasoning := body.object("reasoning")) is not None:
        if reasoning.has("effort"):
            return reasoning.get("effort"), reasoning.name("effort")
        if reasoning.has("enabled"):
            return _switched(reasoning.get("enabled")), reasoning.name("enabled")
    if body.has("thinking"):
        return _thinking(body), "thinking"
    for field in ("enable_thinking", "think"):
        if body.has(field):
            return _switched(body.get(field)), field
    return None, "reasoning_effort"


def _switched(on: bool) -> str:
    return "medium" if on else "none"


def _thinking(body: Body) -> str | None:
    if isinstance(body.get("thinking"), bool):
        return _switched(body.get("thinking"))
    thinking = body.required_object("thinking")
    kind = thinking.one_of("type", ("enabled", "disabled", "adaptive", "auto"))
    if thinking.has("budget_tokens"):
        thinking.ignore("budget_tokens", "reasoning has no budget of its own")
    return None if kind in (None, "auto") else _switched(kind != "disabled")


def _put(body: Body, fields: dict[str, Any], ours: str, name: str, value: Any) -> None:
    if fields.get(ours) is not None:
        raise body.error(ours, f"and {name} are the same; send one of them")
    fields[ours] = value


def _any_of(body: Body, field: str) -> str:
    """A regular expression of literal choices."""
    choices = body.get(field)
    is_list = isinstance(choices, list) and bool(choices)
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise body.wrong(field, "a list of at least one string")
    return "|".join("".join(map(_literal, choice)) for choice in choices)


def _literal(character: str) -> str:
    if character.isalnum() or not character.isascii():
        return character
    return f"\\x{ord(character):02x}"


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
