"""A JSON object that was cut anywhere: its members up to there."""

from __future__ import annotations

import json

import pytest

from cases import cases
from pippin.text.pieces import MAX_ARGUMENTS_DEPTH, members_of

WHOLE = {"a": 'x"\\y{,', "b": [1, {"c": "d"}], "e": {"f": None}, "g": 12}
TEXT = json.dumps(WHOLE)


@cases("num_chars", range(len(TEXT) + 1))
def test_a_cut_object_has_its_first_members(num_chars: int) -> None:
    found = members_of(TEXT[:num_chars])
    assert list(found) == list(WHOLE)[: len(found)]
    for name in list(found)[:-1]:
        assert found[name] == WHOLE[name]
    complete = [n for n in WHOLE if TEXT[:num_chars].find(json.dumps(WHOLE[n]) + ",") > 0]
    assert set(complete) <= set(found)


@pytest.mark.parametrize("text", ["", "[1]", "x", '"', "{" * 100_000, '{"a": ' * 100_000])
def test_what_is_no_object_has_none(text: str) -> None:
    assert members_of(text) in ({}, {"a": {}})


def test_what_is_nested_deeper_than_arguments_may_be_has_none() -> None:
    for depth in (MAX_ARGUMENTS_DEPTH - 1, MAX_ARGUMENTS_DEPTH):
        text = '{"a": ' + "[" * depth
        assert bool(members_of(text)) == (depth < MAX_ARGUMENTS_DEPTH)
