"""The schemas that the benchmark of features asks for."""

from __future__ import annotations

import json

from decode.test_json_schemas import spec_of
from decode.walks import bundled_vocabulary, walk
from features import ENDLESS, FORM
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
