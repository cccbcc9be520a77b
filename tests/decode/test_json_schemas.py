"""What a grammar of a JSON Schema lets through is valid, says a validator that is not ours."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from cases import cases
from decode.schemas import SCHEMAS
from decode.walks import bundled_vocabulary, walk
from pippin.decode.compile import CompiledGrammar, Vocabulary, compile_grammar
from pippin.decode.json_schema import check_schema, closed, expressed
from pippin.errors import RequestError
from pippin.types import GrammarSpec

NUM_WALKS = 12
COLOURS = {"enum": ["red", "green", "blue"]}
# With values that they accept, and values that they reject. All are draft 2020-12.
EXACT: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "one item is unique": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        [[], [5]],
        [[5, 6]],
    ),
    "not unique": (
        {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2},
        [[None, None]],
        [[5]],
    ),
    "names that are listed": (
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Colour"},
            "additionalProperties": {"type": "integer"},
            "$defs": {"Colour": {"title": "Colour", "type": "string", **COLOURS}},
        },
        [{}, {"red": 1}, {"blue": 2, "red": 1}],
        [{"pink": 1}, {"red": "1"}],
    ),
    "names of a pattern": (
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]_"},
            "additionalProperties": {"type": "boolean"},
        },
        [{}, {"a_b": True}, {"a_b": True, "c_": False}],
        [{"ab": True}, {"a_b": 1}],
    ),
    "names of a length": (
        {
            "type": "object",
            "propertyNames": {"minLength": 2, "maxLength": 3},
            "additionalProperties": {"type": "null"},
        },
        [{}, {"ab": None}, {"abc": None, "x\ny": None}],
        [{"a": None}, {"abcd": None}],
    ),
    "any names": (
        {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 1},
        [{}, {"a": 1}],
        [5],
    ),
    "nothing unevaluated": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "unevaluatedProperties": False,
        },
        [{}, {"a": 1}],
        [{"b": 1}],
    ),
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return bundled_vocabulary()


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema, ensure_ascii=False))


def validator_of(schema: Any) -> jsonschema.protocols.Validator:
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def compiled(schema: Any, vocabulary: Vocabulary) -> CompiledGrammar:
    return compile_grammar(spec_of(schema), vocabulary)


def allows(schema: Any, value: Any, vocabulary: Vocabulary) -> bool:
    grammar = compiled(schema, vocabulary)
    tokens = vocabulary.tokenizer.tokenize_str(json.dumps(value))
    matched = grammar._matcher.validate_tokens(tokens)
    if matched < len(tokens):
        return False
    grammar.advance(tokens)
    return grammar.finished or grammar._matcher.is_accepting()


@cases("name", EXACT)
def test_values_are_accepted_and_rejected_as_a_validator_does(
    name: str, vocabulary: Vocabulary
) -> None:
    schema, right, wrong = EXACT[name]
    validator = jsonschema.Draft202012Validator(schema)
    for value in right:
        assert validator.is_valid(value)
        assert allows(schema, value, vocabulary), value
    for value in wrong:
        assert not validator.is_valid(value)
        assert not allows(schema, value, vocabulary), value


ALL = {**SCHEMAS, **{name: schema for name, (schema, _, _) in EXACT.items()}}


@pytest.mark.slow
@cases("name", ALL)
def test_random_replies_are_valid(name: str, vocabulary: Vocabulary) -> None:
    schema = ALL[name]
    grammar, validator, num_finished = compiled(schema, vocabulary), validator_of(schema), 0
    for seed in range(NUM_WALKS):
        tokens, finished = walk(grammar.copy(), vocabulary, seed)
        if finished:
            num_finished += 1
            text = b"".join(vocabulary.tokens[token] for token in tokens)
            validator.validate(json.loads(text))
    assert num_finished >= NUM_WALKS // 2


@cases(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "maxLength": 2, "nullable": True}, ["a", None], ["abc", 5]),
        ({"type": "string", "enum": ["a"], "nullable": True}, ["a", None], ["b"]),
        ({"type": "string", "nullable": False, "maxLength": 1}, ["a"], [None]),
        ({"type": "null", "nullable": True}, [None], [5]),
        ({"$ref": "#/$defs/a", "nullable": True, "$defs": {"a": COLOURS}}, ["red", None], [5]),
        ({"allOf": [{"type": "boolean"}], "nullable": True}, [True, None], ["a"]),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer", "nullable": True}},
                "required": ["a"],
                "nullable": True,
            },
            [{"a": 5}, {"a": None}, None],
            [{}, {"a": "b"}, {"a": 5, "b": 6}],
        ),
    ],
)
def test_nullable_is_the_type_or_null(
    schema: Any, right: list[Any], wrong: list[Any], vocabulary: Vocabulary
) -> None:
    assert [allows(schema, value, vocabulary) for value in right] == [True] * len(right)
    assert [allows(schema, value, vocabulary) for value in wrong] == [False] * len(wrong)


UNENFORCED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"items": COLOURS, "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "propertyNames": {"format": "email"}}, "propertyNames"),
    ({"type": "object", "properties": {"a": {}}, "propertyNames": COLOURS}, "propertyNames"),
    ({"type": "object", "propertyNames": {"enum": []}}, "propertyNames"),
    ({"type": "object", "not": {"required": ["a"]}}, "not"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "string", "format": "password"}, "format"),
]


@cases(("schema", "keyword"), UNENFORCED)
def test_what_has_no_equal_is_refused_or_left_out(
    schema: dict[str, Any], keyword: str, vocabulary: Vocabulary
) -> None:
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    with pytest.raises(RequestError, match=rf"\b{keyword}\b") as caught:
        compiled(whole, vocabulary)
    assert (caught.value.status, caught.value.param) == (400, "json_schema")
    left_out: list[str] = []
    found = expressed(whole, left_out.append)
    assert left_out == [keyword]
    assert expressed(found, left_out.append) == found
    compiled(found, vocabulary)
    assert found["properties"]["x"] == {k: v for k, v in schema.items() if k != keyword}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "format": "x", "uniqueItems": 1, "propertyNames": 5, "nullable": "yes"},
        {"format": [], "type": {}, "items": 5, "maxItems": -1, "uniqueItems": True},
        {"type": "array", "items": {"enum": [[], {}]}, "uniqueItems": True, "minItems": "a"},
        {"type": "object", "propertyNames": {"minLength": -1}, "additionalProperties": []},
        {"type": "object", "propertyNames": {"enum": [[]]}, "unevaluatedProperties": 5},
        {"type": "object", "propertyNames": {"$ref": "#/$defs/a"}, "$defs": 5},
    ],
)
def test_what_is_no_schema_is_refused_and_crashes_nothing(schema: dict[str, Any]) -> None:
    expressed(schema, lambda keyword: None)
    with pytest.raises(RequestError):
        compiled(schema, bundled_vocabulary())
    assert check_schema("{}") == {}


# ---- objects that a schema leaves open hold what it declares ------------------------------------

ONE = {"properties": {"a": {"type": "integer"}}}
SHUT = ONE | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (ONE, SHUT),
        ({"items": ONE}, {"items": SHUT}),
        ({"anyOf": [ONE, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"$defs": {"x": ONE}, "$ref": "#/$defs/x"}, {"$defs": {"x": SHUT}, "$ref": "#/$defs/x"}),
        ({"allOf": [ONE]}, {"allOf": [SHUT]}),  # pydantic's way to describe a reference
        ({"properties": {"b": ONE}}, {"properties": {"b": SHUT}, "additionalProperties": False}),
    ],
)
def test_what_is_left_open_is_closed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected


@cases(
    "schema",
    [
        {"type": "object"},
        ONE | {"additionalProperties": True},
        ONE | {"additionalProperties": {"type": "string"}},
        ONE | {"patternProperties": {"^x": {}}},
        ONE | {"minProperties": 2},
        ONE | {"required": ["b"]},
        {"allOf": [ONE, {"properties": {"b": {}}}]},
        {"items": ONE, "additionalItems": {"allOf": [ONE, {"required": ["b"]}]}},
        ONE | {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]},
        {"properties": {}},
        True,
    ],
)
def test_what_says_otherwise_or_is_combined_stays_as_it_is(schema: Any) -> None:
    assert closed(schema) == schema
