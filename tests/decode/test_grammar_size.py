"""Grammars that are too large are refused before anything compiles them, by the name of a limit."""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import pytest
from walks import bundled_vocabulary

from cases import cases
from hostile_grammars import FAMILIES
from pippin.decode.compile import prove_grammar
from pippin.decode.json_schema import check_schema
from pippin.decode.size import (
    MAX_EXPANSION,
    MAX_NESTING,
    MAX_PART_BYTES,
    check_nesting_of,
    check_part_size,
    check_size,
)
from pippin.errors import RequestError
from pippin.types import GrammarPart, GrammarSpec


@cases("name", FAMILIES)
def test_what_is_too_large_is_refused_by_the_name_of_its_limit(name: str) -> None:
    family, large, _ = FAMILIES[name]
    with pytest.raises(RequestError, match=r"too large.* (at most|deeper than) ") as caught:
        check_size(family(large))
    assert caught.value.param == family(large).kind


@cases("name", FAMILIES)
def test_what_is_within_the_limits_is_compiled(name: str) -> None:
    family, _, small = FAMILIES[name]
    prove_grammar(family(small), bundled_vocabulary())


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 990, 100_000])
def test_a_deep_value_is_refused_without_recursion(depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(RequestError, match="nested deeper than 100 levels") as caught:
        check_nesting_of({"enum": value}, "tools[0].parameters")
    assert caught.value.param == "tools[0].parameters"
    while isinstance(value, list):  # else it is freed by recursion
        value = value.pop()


@cases("depth", [120, 200, 990, 50_000])
@cases("opening", ['{"items":', '{"properties":{"a":', '{"const":[', '{"allOf":['])
def test_a_deep_schema_is_an_error_of_the_request(opening: str, depth: int) -> None:
    closing = {"[": "]", "{": "}"}
    ends = "".join(closing[each] for each in reversed(re.sub(r"[^\[{]", "", opening)))
    text = opening * depth + "1" + ends * depth
    with pytest.raises(RequestError):
        check_schema(text)


def test_a_long_name_is_not_written_before_each_of_many_others() -> None:
    inner = {f"p{i}": {"item": 1} for i in range(2_000)}
    with pytest.raises(RequestError) as caught:
        check_schema(json.dumps({"properties": {"x" * 100_000: {"properties": inner}}}))
    assert len(caught.value.message) < 500


def test_a_custom_tools_grammar_is_named_by_its_field() -> None:
    for part in (
        GrammarPart("lark", "start: " + "x" * MAX_PART_BYTES, "tools[3].format.definition"),
        GrammarPart("regex", f"a{{{MAX_EXPANSION + 1}}}", "tools[3].format.definition"),
    ):
        with pytest.raises(RequestError, match=r"^tools\[3\].* at most 262,144 ") as caught:
            check_part_size(part)
        assert caught.value.param == "tools[3].format.definition"


@pytest.mark.parametrize("kind", ["ebnf", "regex", "json_schema"])
def test_the_check_looks_at_each_character_a_few_times(kind: Any) -> None:
    """Counted in steps of the interpreter, which no machine changes: linear in the text."""
    pieces = ['"', "'", "/", "\\", "[", "]", "(", ")", "{", "}", "{9}", "|", "a", "a:", "\n", ".1"]
    pieces += ["r ::= ", "start: ", "%json {", "%lark {", "#", "//", "~9", "*", "\\p{", "[^", "?:"]
    draw = random.Random(5)
    # One piece again and again, or two, is what makes a careless pattern look back.
    for piece in [*pieces, *("".join(draw.choices(pieces, k=2)) for _ in range(30))]:
        counts = [
            _steps(kind, "start: " * (kind == "ebnf") + piece * size) for size in (400, 1_600)
        ]
        assert counts[1] < 8 * counts[0] + 1_000, piece


def _steps(kind: Any, text: str) -> int:
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_size(GrammarSpec(kind, text))
    except RequestError:
        pass
    finally:
        sys.settrace(before)
    return count


@cases("piece", ["[", '"', "/a", "a", "a.1", "a[", "\\p{", "{1,", "%json {", "(?P<"])
@cases("start", ["start: ", "root ::= ", ""])
def test_a_text_of_a_quarter_of_a_megabyte_is_checked_at_once(piece: str, start: str) -> None:
    """A pattern that looks back would not come to an end here."""
    text = start + piece * (262_000 // len(piece))
    for kind in ("ebnf", "regex"):
        try:
            check_size(GrammarSpec(kind, text))  # type: ignore[arg-type]
        except RequestError as error:
            assert len(error.message) < 300  # noqa: PT017
