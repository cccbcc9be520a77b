"""Prompts have the length that was asked for, and share nothing by accident."""

from __future__ import annotations

import pytest

from bundled import BUNDLED_PATH
from pippin.text.tokenizer import Tokenizer
from prompts import Prompts, count_with


@pytest.mark.parametrize("num_tokens", [1, 24, 64, 600, 2000])
def test_a_prompt_has_exactly_the_tokens_that_the_server_will_count(num_tokens: int) -> None:
    prompts = Prompts("exact", count_with(BUNDLED_PATH))
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    for _ in range(3):
        assert len(tokenizer.encode(prompts.text(num_tokens))) == num_tokens


def test_a_word_that_takes_two_tokens_is_made_up_for() -> None:
    def count(text: str) -> int:
        return sum(2 if word in ("fox", "brave") else 1 for word in text.replace(".", " .").split())

    prompts = Prompts("long words", count)
    assert [count(prompts.text(n)) for n in (50, 200)] == [50, 200]


def test_without_a_tokenizer_words_and_full_stops_count() -> None:
    assert len(Prompts("words").text(90).replace(".", " .").split()) == 90


def test_prompts_part_within_the_first_grid_block() -> None:
    prompts = Prompts("distinct", count_with(BUNDLED_PATH))
    tokenizer = Tokenizer.load(BUNDLED_PATH)
    starts = {tuple(tokenizer.encode(prompts.text(64))) for _ in range(50)}
    assert len(starts) == 50


def test_a_seed_fixes_the_prompts() -> None:
    assert Prompts("a").text(50) == Prompts("a").text(50)
    assert Prompts("a").text(50) != Prompts("b").text(50)
    assert Prompts("a").question() == Prompts("a").question()
