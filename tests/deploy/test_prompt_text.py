"""The text by which a router compares prompts: stable from turn to turn, and bounded."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from cases import cases
from pippin.deploy.prompt_text import MAX_CHARS, prompt_text

USER = {"role": "user", "content": "Who are you?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "4"}]}
BLOCKS = {"role": "assistant", "content": [{"type": "text", "text": "A fox."}]}


def text_of(**fields: Any) -> str:
    return prompt_text(json.dumps(fields).encode())


@pytest.mark.parametrize("field", ["messages", "input"])
def test_each_turn_begins_with_the_text_of_the_turn_before(field: str) -> None:
    turns: list[dict[str, Any]] = [USER, CALL, RESULT, BLOCKS, USER]
    before = {"tools": [{"name": "add"}], "system": "Be brief.", "instructions": "Be kind."}
    texts = [text_of(**before, **{field: turns[:end]}) for end in range(1, len(turns) + 1)]
    for shorter, longer in pairwise(texts):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)


def test_what_templates_put_before_the_messages_is_before_them() -> None:
    text = text_of(messages=[USER], system="Be brief.", tools=[{"name": "add"}])
    assert text.index("add") < text.index("Be brief.") < text.index("Who")
    assert text_of(messages=[USER], system="Be rude.") not in text


def test_branches_of_one_prompt_share_all_characters_before_they_differ() -> None:
    first, second = (text_of(prompt=f"One story. {end}") for end in ("A fox", "A cat"))
    assert first[:13] == second[:13] == "One story. A "


@cases(
    "body",
    [b"", b"{", b"[]", b'"text"', b"{}", b'{"messages": []}', b'{"messages": null}', b"[" * 10**6],
)
def test_what_has_no_prompt_or_is_not_valid_has_no_text(body: bytes) -> None:
    assert prompt_text(body) == ""


def test_a_text_is_bounded() -> None:
    assert len(text_of(prompt="fox " * MAX_CHARS)) == MAX_CHARS
