"""Whatever a grammar of a JSON Schema lets through is valid, says a validator that is not ours."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from cases import cases
from decode.schemas import SCHEMAS
from decode.walks import bundled_vocabulary, walk
from pippin.decode.compile import Vocabulary, compile_grammar
from pippin.types import GrammarSpec

NUM_WALKS = 12


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return bundled_vocabulary()


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def validator_of(schema: Any) -> jsonschema.protocols.Validator:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def test_there_are_a_hundred_schemas() -> None:
    assert len(SCHEMAS) >= 100


@pytest.mark.slow
@cases("name", SCHEMAS)
def test_random_replies_are_valid(name: str, vocabulary: Vocabulary) -> None:
    schema = SCHEMAS[name]
    compiled = compile_grammar(spec_of(schema), vocabulary)
    validator = validator_of(schema)
    num_finished = 0
    for seed in range(NUM_WALKS):
        tokens, finished = walk(compiled.copy(), vocabulary, seed)
        text = b"".join(vocabulary.tokens[token] for token in tokens)
        if finished:
            num_finished += 1
            validator.validate(json.loads(text))
    assert num_finished >= NUM_WALKS // 2
