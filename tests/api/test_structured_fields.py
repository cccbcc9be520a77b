"""`response_format` and SGLang's fields, as requests and as `LLM`'s parameters."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import MODEL, TEXT

from pippin.api.dialects.chat_completions import parse_chat, parse_completion
from pippin.api.model_info import RequestRules
from pippin.api.requests.sampling_fields import check_sampling
from pippin.config import LimitsConfig
from pippin.decode.json_schema import check_schema
from pippin.errors import RequestError
from pippin.types import GrammarSpec, SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {"const": "é"}}}


RULES = RequestRules(MODEL, TEXT.defaults, LimitsConfig())


def asked(endpoint: str, **fields: Any) -> GrammarSpec | None:
    if endpoint == "python":
        return check_sampling(SamplingParams(**fields), MODEL.vocab_size).grammar
    if endpoint == "chat":
        return chat_leniency(RULES, **fields)[0]
    body = {"model": "stories", "prompt": "Hi."} | fields
    return parse_completion(body, RULES).options.params.grammar


def response_format(**described: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing"} | described}


over_http = pytest.mark.parametrize("endpoint", ["chat", "completions"])
everywhere = pytest.mark.parametrize("endpoint", ["chat", "completions", "python"])


@over_http
@pytest.mark.parametrize("strict", [True, False, None])
def test_a_response_format_is_a_schema_with_its_keys_in_order(
    endpoint: str, strict: bool | None
) -> None:
    given = response_format(schema=SCHEMA, strict=strict, description="a thing")
    spec = asked(endpoint, response_format=given)
    assert spec is not None
    assert spec.kind == "json_schema"
    assert list(json.loads(spec.text)["properties"]) == ["b", "a"]
    assert json.loads(spec.text) == SCHEMA


@over_http
def test_json_object_and_text(endpoint: str) -> None:
    spec = asked(endpoint, response_format={"type": "json_object"})
    assert spec == GrammarSpec("json_schema", '{"type": "object"}')
    assert asked(endpoint, response_format={"type": "text"}) is None
    assert asked(endpoint) is None
    assert asked(endpoint, response_format={"type": "text"}, regex="a") == GrammarSpec("regex", "a")


@everywhere
def test_sglangs_fields(endpoint: str) -> None:
    assert asked(endpoint, regex="a+") == GrammarSpec("regex", "a+")
    assert asked(endpoint, ebnf="root ::= x") == GrammarSpec("ebnf", "root ::= x")
    for given in (SCHEMA, json.dumps(SCHEMA)):
        spec = asked(endpoint, json_schema=given)
        assert spec is not None
        assert json.loads(spec.text) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "must be a JSON object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {}}, "response_format.type", "null"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "is required",
        ),
        (
            {"response_format": response_format()},
            "response_format.json_schema.schema",
            "is required",
        ),
        (
            {"response_format": response_format(schema=SCHEMA, stirct=True)},
            "response_format.json_schema.stirct",
            "did you mean strict",
        ),
        (
            {"response_format": response_format(schema=SCHEMA, strict="yes")},
            "response_format.json_schema.strict",
            "true or false",
        ),
        ({"regex": 5}, "regex", "a string"),
        ({"json_schema": [1]}, "json_schema", "a JSON Schema"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "ebnf and regex both constrain"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex", "both constrain"),
    ],
    ids=str,
)
@over_http
def test_what_is_wrong_is_named(
    endpoint: str, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        asked(endpoint, **fields)
    assert caught.value.param == param


UNIQUE = {"type": "array", "items": {"type": "integer", "not": {"const": 3}}, "uniqueItems": True}
LOOSER = {"type": "array", "items": {"type": "integer"}}


def chat_leniency(rules: RequestRules, **fields: Any) -> tuple[GrammarSpec | None, str]:
    body = {"model": "stories", "messages": [{"role": "user", "content": "Hi."}]} | fields
    chat = parse_chat(body, rules)
    return chat.options.params.grammar, chat.leniency.header()


@pytest.mark.parametrize("strict", [False, None])
def test_keywords_that_cannot_be_enforced_are_left_out_and_reported(strict: bool | None) -> None:
    given = response_format(schema=UNIQUE, strict=strict)
    spec, header = chat_leniency(RULES, response_format=given)
    assert spec is not None
    assert json.loads(spec.text) == LOOSER
    assert header == "response_format.not, response_format.uniqueItems"
    spec, header = chat_leniency(RULES, guided_json=json.dumps(UNIQUE))
    assert spec is not None
    assert (json.loads(spec.text), header) == (LOOSER, "guided_json.not, guided_json.uniqueItems")


def test_strict_schemas_strict_servers_and_python_keep_them_to_be_refused() -> None:
    strict_rules = replace(RULES, strict_fields=True)
    specs = [
        chat_leniency(RULES, response_format=response_format(schema=UNIQUE, strict=True))[0],
        chat_leniency(strict_rules, response_format=response_format(schema=UNIQUE))[0],
        asked("python", json_schema=UNIQUE),
    ]
    for spec in specs:
        assert spec is not None
        assert json.loads(spec.text) == UNIQUE
        with pytest.raises(RequestError, match=r"the keyword (not|uniqueItems) is not supported"):
            check_schema(spec.text)


def test_a_keyword_that_can_be_enforced_is_not_reported() -> None:
    colours = {"type": "object", "propertyNames": {"enum": ["red", "blue"]}}
    spec, header = chat_leniency(RULES, json_schema=colours)
    assert spec is not None
    assert (json.loads(spec.text), header) == (colours, "")
    assert check_schema(spec.text)["patternProperties"] == {"^(red|blue)$": {}}
