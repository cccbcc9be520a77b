"""Structured output on a real model, from `LLM` and over HTTP, checked by others' validators."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

import pytest

from decode.schemas import SCHEMAS
from decode.test_json_schemas import validator_of
from pippin import LLM, SamplingParams
from pippin.config import Config, EngineConfig, ModelConfig
from pippin.errors import PippinError, RequestError

PERSON = SCHEMAS["person"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=160)
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=160)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as model:
        yield model


@pytest.mark.slow
def test_every_finished_reply_is_valid_and_a_cut_one_says_so(llm: LLM) -> None:
    names = list(SCHEMAS)
    asked = [
        replace(params, max_tokens=96, json_schema=SCHEMAS[name])
        for name, params in zip(names, cycle([GREEDY, SAMPLED]), strict=False)
    ]
    completions = llm.generate(["Once upon a time, in JSON: "] * len(names), asked)
    finished = 0
    for name, completion in zip(names, completions, strict=True):
        if completion.finish_reason == "length":
            assert len(completion.tokens) == 96, name
            continue
        assert completion.finish_reason == "stop", name
        validator_of(SCHEMAS[name]).validate(json.loads(completion.text))
        finished += 1
    assert finished >= len(names) // 2  # the others are numbers and strings without an end


EXTRAS: list[dict[str, float]] = [
    {},
    {"n": 3},
    {"logprobs": 2},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"min_tokens": 120},  # more than the grammar allows: it ends where it must
    {"ignore_eos": True},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.slow
def test_a_schema_combines_with_other_parameters(llm: LLM) -> None:
    schema = {**PERSON, "properties": {**PERSON["properties"], "age": {"const": 3}}}
    asked = [
        replace(params, json_schema=schema, **extra)
        for params in (GREEDY, SAMPLED)
        for extra in EXTRAS
    ]
    completions = llm.generate(["A person: "] * len(asked), asked)
    each = [params for params in asked for _ in range(params.n)]
    for params, completion in zip(each, completions, strict=True):
        assert completion.finish_reason == "stop", params
        validator_of(schema).validate(json.loads(completion.text))
        if params.logprobs is not None:
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.tokens)


@pytest.mark.slow
def test_log_probabilities_change_no_token(llm: LLM) -> None:
    """Forced tokens are then drawn one by one, and are the same."""
    for params in (GREEDY, SAMPLED):
        asked = replace(params, json_schema=PERSON, max_tokens=60)
        plain, scored = llm.generate(["A person: "] * 2, [asked, replace(asked, logprobs=0)])
        assert plain.text[:20] == scored.text[:20]
        assert plain.tokens[:8] == scored.tokens[:8]


@pytest.mark.slow
def test_a_stop_string_cuts_a_constrained_reply(llm: LLM) -> None:
    asked = replace(GREEDY, json_schema=PERSON, stop=('"last_name"',))
    (completion,) = llm.generate("A person: ", asked)
    assert completion.finish_reason == "stop"
    assert completion.text.startswith('{"first_name": ')
    assert "last_name" not in completion.text


@pytest.mark.slow
def test_regex_and_ebnf_from_python(llm: LLM) -> None:
    pattern = "(red|green) [0-9]{2,4}"
    (completion,) = llm.generate("A colour: ", replace(SAMPLED, regex=pattern))
    assert re.fullmatch(pattern, completion.text)
    (completion,) = llm.generate("Yes? ", replace(SAMPLED, ebnf='root ::= "yes" | "no"'))
    assert completion.text in ("yes", "no")


@pytest.mark.slow
def test_what_cannot_be_kept_is_an_error_that_names_it(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the keyword not is not supported") as caught:
        llm.generate("a", replace(GREEDY, json_schema={"not": {}}))
    assert caught.value.param == "json_schema"
    with pytest.raises(RequestError, match="both constrain the reply"):
        llm.generate("a", replace(GREEDY, regex="a", ebnf="b"))
    asked = replace(GREEDY, max_tokens=2, ignore_eos=True)
    assert llm.generate("a", asked)[0].finish_reason == "length"


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_the_toy_model_obeys_over_its_few_tokens(overlap: bool) -> None:
    config = Config(
        model=ModelConfig(backend="fake"), engine=EngineConfig(overlap=overlap, max_running=4)
    )
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 3, "maxItems": 3}
    pattern = r"[a-z]{3}-[0-9]{3}"
    with LLM(config=config) as llm:
        (reply,) = llm.generate("a", replace(SAMPLED, regex=pattern))
        assert re.fullmatch(pattern, reply.text)
        with pytest.raises(PippinError, match="the grammar failed"):
            llm.generate("a", replace(SAMPLED, json_schema=schema))  # it has no token for a blank
        assert llm.generate("a", replace(SAMPLED, max_tokens=2))[0].finish_reason == "length"
