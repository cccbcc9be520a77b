"""The grammar benchmark: what it asks for, and what it says of its numbers."""

from __future__ import annotations

import json

from decode.test_json_schemas import spec_of
from decode.walks import bundled_vocabulary, walk
from pippin.bench.in_process.grammar import ENDLESS, FORM, GrammarOutcome, summarize
from pippin.bench.results.pairs import Pairs
from pippin.decode.compile import compile_grammar


def test_a_form_is_mostly_forced_and_the_endless_reply_is_not() -> None:
    vocabulary = bundled_vocabulary()
    form = compile_grammar(spec_of(FORM), vocabulary)
    tokens, finished = walk(form, vocabulary, 0)
    text = b"".join(vocabulary.tokens[token] for token in tokens)
    assert finished
    assert list(json.loads(text)) == FORM["required"]
    endless = compile_grammar(spec_of(ENDLESS), vocabulary)
    tokens, finished = walk(endless, vocabulary, 0, free=0, most=200)
    assert (len(tokens), finished) == (200, False)
    assert not endless.forced()


def test_targets_are_judged_by_the_middle_of_the_ratios() -> None:
    slow, fast = Pairs([90.0, 98.0, 99.0], [100.0] * 3), Pairs([1.5, 1.1, 1.3], [1.0] * 3)
    report = summarize(GrammarOutcome(16, 96, slow, fast, 60, 50), [])
    rows = report.tables[0].rows
    assert rows[0][3:] == ("0.980x", "0.940-0.985", "at least 0.97x: met")
    assert rows[1][3] == "1.300x"
    missed = summarize(GrammarOutcome(16, 96, Pairs([96.0], [100.0]), fast, 60, 50), [])
    assert missed.tables[0].rows[0][-1] == "at least 0.97x: missed"
